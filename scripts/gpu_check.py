"""Runs every test that needs CUDA, from the checkout, with this machine's own python (`make gpu-check`).

Nothing is installed into that python: it imports the checkout as `tk` through the link .build/tk, and packages that are
missing or too old are installed from .build/wheels (see `make wheels`) into .build/site. The python must have torch
with CUDA, pip and packaging.
"""

import importlib.metadata
import os
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


def main(arguments: list[str]) -> int:
    problem = cuda_problem()
    if problem:
        print(f"gpu-check: {problem}", file=sys.stderr)
        return 1
    BUILD.mkdir(exist_ok=True)
    if not (BUILD / "tk").exists():
        (BUILD / "tk").symlink_to("..")
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    if complete(wanted) != 0:
        print(
            "gpu-check: packages are missing: run `make wheels` on a machine with a network, then copy .build/wheels",
            file=sys.stderr,
        )
        return 1
    path = os.pathsep.join([str(BUILD), str(SITE)])
    # pytest-benchmark, where that python has it, warns beside `-n`, and warnings are errors here.
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-m", "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
