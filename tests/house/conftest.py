"""Fixtures: the source tree, over which the tests of the house iterate."""

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tk.tests.house.syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "parallel", "checkpoint", "proto", "text", "model", "data", "train", "infer", "parity", "cli")


def package_files() -> Iterator[Path]:
    """Yields the path of every module of the package but generated ones, relative to the repository root."""
    for folder in (ROOT.glob("*.py"), *((ROOT / room).rglob("*.py") for room in ROOMS)):
        yield from (path.relative_to(ROOT) for path in sorted(folder) if "_pb2" not in path.name)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Path]:
    """Modules of the package, relative to the root."""
    files = list(package_files())
    assert len(files) > len(ROOMS)
    return files


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """The files that git knows, relative to the root. Without git, as in an unpacked sdist, the test is skipped."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in listed if name and (ROOT / name).is_file())


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="package", autouse=True)
def syntax_is_forgotten() -> Iterator[None]:
    """Frees the syntax trees after the last test of the house: other tests would feel their 100 MB."""
    yield
    nodes.cache_clear()
