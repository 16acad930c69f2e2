"""Installs the versions of Triton with which its kernels are tested, into .build/triton (`make triton`).

They stay out of .venv, because each has 250 MB and only these tests need them. `newest` links to the last one.
"""

import shutil
import sys
from pathlib import Path
from typing import Final

from tk.scripts.real_parts import ROOT, PartMissing, run

TRITON: Final = ROOT / ".build" / "triton"
VERSIONS: Final = ("3.6.0", "3.8.0")  # that of the oldest torch that tk allows, and the newest


def install(version: str, triton: Path = TRITON) -> None:
    """Makes the folder of one version, unless it is there already.

    Raises:
        PartMissing: the version cannot be installed.
    """
    folder, half = triton / version, triton / f"{version}.half"
    if folder.exists():
        return
    shutil.rmtree(half, ignore_errors=True)
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--retries", "1")
    run(sys.executable, *pip, "--no-deps", "--target", half, f"triton=={version}")
    half.rename(folder)


def main() -> int:
    """Installs all versions; returns 1, with a line that says why, where one cannot be installed."""
    try:
        for version in VERSIONS:
            install(version)
    except (PartMissing, OSError) as error:
        print(f"make triton leaves out its tests: {error}", file=sys.stderr, flush=True)
        return 1
    newest = TRITON / "newest"
    newest.unlink(missing_ok=True)
    newest.symlink_to(VERSIONS[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
