"""Run every test that needs CUDA, from the checkout, with this machine's own python (`make gpu-check`).

Nothing is installed into that python: the checkout is seen as `tk` through the link .build/tk, and packages that are
missing or too old go into .build/site, out of .build/wheels (see `make wheels`). The python must bring torch with CUDA,
pip and packaging.
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
# Never taken from wheels: torch must be the one built for this machine's driver, the others are not used by tests.
NOT_NEEDED = frozenset({"torch", "setuptools", "ruff", "mypy"})


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """What the package and its tests need, from the [project] table of pyproject.toml."""
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [r for r in map(Requirement, wanted) if r.name not in NOT_NEEDED]


def missing(wanted: Iterable[Requirement], path: list[str]) -> list[Requirement]:
    """Those of `wanted` that no distribution on `path` meets; the first one found there counts, as for imports."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=path):
        found.setdefault(distribution.name.lower().replace("_", "-"), distribution.version)
    return [r for r in wanted if r.name not in found or not r.specifier.contains(found[r.name], prereleases=True)]


def cuda_problem() -> str | None:
    """Why CUDA cannot be used from this python, or None."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error}); name another python with GPU_PYTHON=..."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
    return None


def complete(wanted: list[Requirement]) -> int:
    """Put into .build/site what this python lacks. Returns pip's exit code, 0 when nothing is missing."""
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
        print("gpu-check: fill .build/wheels with `make wheels` where there is a network", file=sys.stderr)
        return 1
    path = os.pathsep.join([str(BUILD), str(SITE)])
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
