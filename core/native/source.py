"""A native library as plain data: its translation units, its flags, and the key of its content."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..cpu import Cpu

# No -march=native: a library may be loaded on another machine of a shared home folder. No fast-math, no contraction:
# the order of every sum is that of the source. No warnings (-w): users could do nothing about them.
COMMON_FLAGS: Final = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-w",
)
# -O3: without it `ziglang` compiles its runtime for debugging, for half a minute.
# -z defs: the linker, not a later load, reports functions that are missing.
LINK_FLAGS: Final = ("-O3", "-shared", "-Wl,-z,defs", "-pthread", "-lm")
_FORMAT: Final = 1  # of the cache; with another number no older library is used


@dataclass(frozen=True, slots=True)
class NativeUnit:
    """A translation unit: one source file compiled with flags of its own.

    Attributes:
        name: the unit's name among those of its library, for example "avx2".
        source: the C file. Two units may share a file and differ in flags.
        flags: flags beside `COMMON_FLAGS`: an instruction set ("-mavx2"), defines ("-DWIDTH=8").
        machines: the machines (`platform.machine()`) that the unit is for; () = all.
    """

    name: str
    source: Path
    flags: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NativeSource:
    """The source of a native library.

    Functions to be called from Python need `visibility("default")`. A unit may be left out, so that another one refers
    to its functions by weak declarations only.

    Attributes:
        name: the library's name, part of file names.
        units: the translation units. The first of a machine is the base: without it there is no library.
        headers: the headers that the units include, from any of these headers' folders.
        link_flags: flags of the link beside `LINK_FLAGS`, for example "-fsanitize=address".
    """

    name: str
    units: tuple[NativeUnit, ...]
    headers: tuple[Path, ...] = ()
    link_flags: tuple[str, ...] = ()

    def units_for(self, machine: str) -> tuple[NativeUnit, ...]:
        """Returns the units that are for a machine, the base first."""
        return tuple(unit for unit in self.units if not unit.machines or machine in unit.machines)

    def for_cpu(self, cpu: Cpu) -> "NativeSource":
        """Returns the source without the units that the CPU cannot run, which are most of the time of a build."""
        return replace(self, units=tuple(unit for unit in self.units if not cpu.lacks(unit.flags)))

    def stem(self, machine: str) -> str:
        """Returns the name, without suffix, of this library's files for a machine: NAME-KEY.

        The key is a digest of everything that decides the library except for the compiler: sources, headers, flags
        and machine, but not the folder of the sources.

        Raises:
            OSError: a source or header cannot be read.
        """
        units = [(unit.name, _digest(unit.source), unit.flags) for unit in self.units_for(machine)]
        headers = [(header.name, _digest(header)) for header in self.headers]
        content = [_FORMAT, machine, COMMON_FLAGS, LINK_FLAGS, self.link_flags, units, headers]
        return f"{self.name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
