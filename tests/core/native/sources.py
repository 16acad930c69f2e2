"""Small C sources, compilers that count, refuse or wait, and libraries of an attacker."""

import os
import shlex
from pathlib import Path
from typing import Final

import pytest

from tk.core.native import NativeSource, NativeUnit
from tk.core.native.build import BuiltLibrary, build_library
from tk.core.native.compiler import find_compilers
from tk.core.native.library_folder import LibraryFolder

EXPORT: Final = '__attribute__((visibility("default")))'
MACHINE: Final = os.uname().machine
_COUNTING: Final = """#!/bin/sh
echo "$*" >> {log}
{before}
exec {compiler} "$@"
"""


def small_source(folder: Path, name: str = "small", number: int = 42) -> NativeSource:
    """Writes a library of two units and a header: `answer()` returns a number, `twice(x)` 2x."""
    folder.mkdir(exist_ok=True)
    (folder / "number.h").write_text(f"#define NUMBER {number}\n")
    (folder / "answer.c").write_text(f'#include "number.h"\n{EXPORT} int answer(void) {{ return NUMBER; }}\n')
    (folder / "twice.c").write_text(f"{EXPORT} int twice(int x) {{ return FACTOR * x; }}\n")
    units = (NativeUnit("scalar", folder / "answer.c"), NativeUnit("twice", folder / "twice.c", ("-DFACTOR=2",)))
    return NativeSource(name, units, (folder / "number.h",))


def plant(folder: LibraryFolder, stem: str, workshop: Path) -> None:
    """Puts another library with a true record under a library's name: its `answer()` returns 666."""
    workshop.mkdir()
    built = folder.path / "built"
    built.mkdir()
    folder.add(stem, build_library(small_source(workshop, "evil", 666), MACHINE, built, quiet))


def plant_bytes(folder: LibraryFolder, stem: str, data: bytes) -> None:
    """Puts any bytes, with a true record, under a library's name."""
    path = folder.path / "any.so"
    path.write_bytes(data)
    folder.add(stem, BuiltLibrary(path, ("scalar", "twice"), (), "none", ("none",)))


def quiet(line: str) -> None:
    """Shows no progress."""


class CountingCompiler:
    """A C compiler that is $CC and writes down its runs.

    Args:
        before: shell commands that it runs first; "$*" are its arguments.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "", name: str = "counting") -> None:
        self.path, self.log = folder / name, folder / f"{name}.log"
        monkeypatch.delenv("CC", raising=False)
        real = shlex.join(next(find_compilers()).command)
        self.path.write_text(_COUNTING.format(log=shlex.quote(str(self.log)), before=before, compiler=real))
        self.path.chmod(0o755)
        monkeypatch.setenv("CC", str(self.path))

    def runs(self) -> list[str]:
        """Returns the arguments of each run since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def compiled(self) -> list[str]:
        """Returns the objects that were compiled since the last call."""
        return sorted(line.split()[-1] for line in self.runs() if " -c " in line)
