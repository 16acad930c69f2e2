"""Small C sources, and the compiler that counts its runs."""

import os
import stat
from pathlib import Path

import pytest

from tk.core.native import NativeSource, NativeUnit

EXPORT = '__attribute__((visibility("default")))'
COUNTING = """#!/bin/sh
echo "$*" >> "$0.log"
exec {compiler} "$@"
"""


def small_source(folder: Path, name: str = "small") -> NativeSource:
    """Writes a library of two units and a header: `answer()` returns 42, `twice(x)` 2x."""
    (folder / "number.h").write_text("#define NUMBER 42\n")
    (folder / "answer.c").write_text(f'#include "number.h"\n{EXPORT} int answer(void) {{ return NUMBER; }}\n')
    (folder / "twice.c").write_text(f"{EXPORT} int twice(int x) {{ return FACTOR * x; }}\n")
    units = (NativeUnit("scalar", folder / "answer.c"), NativeUnit("twice", folder / "twice.c", ("-DFACTOR=2",)))
    return NativeSource(name, units, (folder / "number.h",))


class CountingCompiler:
    """A C compiler that is $CC and writes down its runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str = "cc") -> None:
        self.path = folder / "counting-cc"
        self.path.write_text(COUNTING.format(compiler=compiler))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", str(self.path))

    def runs(self) -> list[str]:
        """Returns the arguments of each run since the last call."""
        log = Path(f"{self.path}.log")
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def compiled(self) -> list[str]:
        """Returns the objects that were compiled since the last call."""
        return sorted(os.path.basename(line.split()[-1]) for line in self.runs() if " -c " in line)
