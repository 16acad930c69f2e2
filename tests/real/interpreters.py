"""The Pythons of this machine, and environments that have nothing of a checkout or of a user."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

OWN = f"{sys.version_info.major}.{sys.version_info.minor}"  # the Python of `.venv`
PATIENCE = 900.0  # seconds of one command on a busy machine
CPU_INDEX = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
# Commands of tk and pip need no program but these: no compiler is among them.
PROGRAMS = ("basename", "bash", "dirname", "env", "git", "mkdir", "rm", "sh", "uname")


def interpreter(minor: str) -> Path:
    """Returns the program of a version of Python, as "3.12", which can make environments; else the test is skipped."""
    folders = [Path(sys.base_prefix) / "bin", *sorted(Path.home().glob(".pyenv/versions/*/bin"))]
    folders += [Path("/usr/local/bin"), Path("/usr/bin")]
    for program in (folder / f"python{minor}" for folder in folders):
        probe = [str(program), "-c", "import venv, ensurepip"]
        if program.exists() and subprocess.run(probe, capture_output=True).returncode == 0:
            return program
    pytest.skip(f"Python {minor} is not on this machine: untested")


def bare(folder: Path, *programs: Path) -> dict[str, str]:
    """Returns the variables of an empty home, and of a PATH with a few programs and without a compiler.

    Args:
        folder: the home, and the folder of the PATH, are made in it.
        programs: folders of further programs, which come first.
    """
    home, tools = folder / "home", folder / "tools"
    for each in (home, tools):
        each.mkdir(exist_ok=True)
    for name in PROGRAMS:
        if (found := shutil.which(name)) and not (tools / name).exists():
            (tools / name).symlink_to(found)
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}  # the registry of the machine
    path = os.pathsep.join(map(str, (*programs, tools)))
    return pip | {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "PIP_RETRIES": "0"}


def run(words: Sequence[str | Path], folder: Path, variables: dict[str, str]) -> str:
    """Runs a command to its end in a folder; returns its standard output.

    Raises:
        AssertionError: it failed.
    """
    command = list(map(str, words))
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    said = f"{' '.join(command)}: exit code {done.returncode}"
    assert done.returncode == 0, f"{said}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(python: Path, words: Sequence[str | Path], folder: Path, variables: dict[str, str]) -> None:
    """Installs packages by the pip of an environment."""
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], folder, variables)
