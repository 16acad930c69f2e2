"""Fills .build/wheels with every pinned package that a GPU machine without network may lack (`make wheels`).

The machine brings its own torch, built for its driver. All other packages have the versions of the lock, so that
`scripts/gpu_check.py` can add the missing ones to the machine's python.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".build" / "wheels"
PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("2014", "_2_24", "_2_28", "_2_31", "_2_34"))
MOST_BYTES = 64 << 20
# Packages that a machine for models has (torch built for its driver, large wheels), or that only developers use.
LEFT_OUT = frozenset(
    {"torch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "numpy", "transformers"}
    | {"setuptools", "ruff", "mypy", "mypy_extensions", "ast_serialize", "librt", "pathspec", "pyarrow"}
)


def pins(lock: str) -> list[str]:
    """Returns the lock's `name==version` lines, without comments and the packages of LEFT_OUT."""
    lines = (line.strip() for line in lock.splitlines())
    return [line for line in lines if line and line[0] != "#" and line.split("==")[0].lower() not in LEFT_OUT]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python-version", default="3.12", help="Python version of the GPU machine (default 3.12)")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", options.python_version]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    WHEELS.mkdir(parents=True, exist_ok=True)
    code = subprocess.run([*command, "--dest", str(WHEELS), *pins((ROOT / "requirements.lock").read_text())]).returncode
    files = list(WHEELS.glob("*.whl"))
    size = sum(file.stat().st_size for file in files)
    print(f"{WHEELS}: {len(files)} wheels, {size / 2**20:.0f} MiB")
    if size > MOST_BYTES:
        print(f"These are more than {MOST_BYTES >> 20} MiB, which a GPU machine may not take.", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
