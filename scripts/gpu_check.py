"""Runs what needs CUDA, from the checkout, with this machine's own python (`make gpu-check`): tests, then benchmarks.

Nothing is installed into that python: it imports the checkout as `tk` through the link .build/tk, and packages that are
missing or too old are installed from .build/wheels (see `make wheels`) into .build/site. The python must have torch
with CUDA, pip and packaging. It runs in parts (gpu_parts.py), and ends with a table of all that have run.
"""

import argparse
import importlib.metadata
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
SITE = BUILD / "site"
# Never installed from wheels: torch must be the one built for this machine's driver, and tests do not use the others.
NOT_NEEDED = frozenset({"torch", "setuptools", "ruff", "mypy"})


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """Returns the requirements of the package and its tests, from the [project] table of pyproject.toml."""
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [r for r in map(Requirement, wanted) if r.name not in NOT_NEEDED]


def missing(wanted: Iterable[Requirement], path: list[str]) -> list[Requirement]:
    """Returns the requirements that no distribution on `path` meets; as in imports, the first one of a name counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=path):
        found.setdefault(distribution.name.lower().replace("_", "-"), distribution.version)
    return [r for r in wanted if r.name not in found or not r.specifier.contains(found[r.name], prereleases=True)]


def cuda_problem() -> str | None:
    """Returns the reason why this python cannot use CUDA, or None if it can."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error}): name another python with GPU_PYTHON=..."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} finds no CUDA device"
    return None


def complete(wanted: list[Requirement]) -> int:
    """Installs the requirements that this python lacks into .build/site; returns pip's exit code, or 0."""
    lacking = missing(wanted, [str(SITE), *sys.path])
    if not lacking:
        return 0
    print("gpu-check: from .build/wheels:", ", ".join(map(str, lacking)), flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    command += ["--no-index", "--find-links", str(BUILD / "wheels"), "--target", str(SITE), *map(str, lacking)]
    return subprocess.run(command).returncode


def machine_line() -> str:
    """Returns what the figures were measured on."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {name: _version(name) for name in ("triton", "transformers", "vllm", "torchtitan")}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    python = ".".join(map(str, sys.version_info[:2]))
    return f"`make gpu-check` on {len(names)} x {names[0]}, torch {torch.__version__}, {packages}, Python {python}."


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def prepared() -> bool:
    """Links the checkout and completes the packages; returns False, and says why, if tests cannot run here."""
    BUILD.mkdir(exist_ok=True)
    if not (BUILD / "tk").exists():
        (BUILD / "tk").symlink_to("..")
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    if complete(wanted) == 0:
        return True
    print(
        "gpu-check: packages are missing: run `make wheels` on a machine with a network, then copy .build/wheels",
        file=sys.stderr,
    )
    return False


def main(arguments: list[str]) -> int:
    problem = cuda_problem()
    if problem:
        print(f"gpu-check: {problem}", file=sys.stderr)
        return 1
    if not prepared():
        return 1
    sys.path.insert(0, str(BUILD))
    from tk.scripts.gpu_parts import PARTS, markdown, outcomes_in, run_part

    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or BUILD / "gpu-check"))
    parser.add_argument("--pytest", default="", help="further arguments of pytest, as one text")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(names):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose of {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BUILD), str(SITE)])}
    environment |= {"TK_BENCH_RUN": str(options.out.absolute() / "run")}
    code = 0
    for part in (each for each in PARTS if not options.parts or each.name in options.parts):
        print(f"gpu-check: {part.name}: {part.what} ...", flush=True)
        outcome = run_part(part, options.out, ROOT, environment, shlex.split(options.pytest))
        print(f"gpu-check: {part.name}: {outcome.result} in {outcome.seconds:.0f} s", flush=True)
        code = code or int(not outcome.passed)
    table = markdown(machine_line(), outcomes_in(options.out))
    (options.out / "gpu.md").write_text(table)
    print(f"\n{table}\ngpu-check: this table is {options.out / 'gpu.md'}, and output of parts beside it")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
