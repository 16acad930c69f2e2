"""Compiles the units of a native library side by side and links those that the compiler accepts."""

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from ..cores import usable_cores
from ..errors import TkError
from .compiler import Compiler, find_compilers, install_hint
from .source import COMMON_FLAGS, LINK_FLAGS, NativeSource, NativeUnit

Say = Callable[[str], None]
# Messages of a machine that lacks something for a moment; such a failure says nothing about a unit.
_PASSING: Final = (
    "No space left",
    "quota exceeded",
    "annot allocate memory",
    "out of memory",
    "Killed",
    "not end within",
)
_SHOWN: Final = 300  # characters of a compiler's messages
_SILENCE: Final = 5.0  # seconds without a line, after which people think that a command hangs

_log = logging.getLogger(__name__)


class BuildFailed(TkError):
    """A native library that could not be built."""


class NoCompiler(BuildFailed):
    """A machine without any C compiler."""


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """A shared library, just linked.

    Attributes:
        path: the library.
        units: the names of the units in it.
        omitted: the names of the units that the compiler refused, each with its messages.
        compiler: the identity of the compiler.
        tried: the identities of all compilers that were tried, this one last.
    """

    path: Path
    units: tuple[str, ...]
    omitted: tuple[tuple[str, str], ...]
    compiler: str
    tried: tuple[str, ...]


def build_library(source: NativeSource, machine: str, folder: Path, on_progress: Say) -> BuiltLibrary:
    """Builds a library with the first compiler that can compile its base unit.

    Args:
        machine: the machine (`platform.machine()`) whose units are compiled.
        folder: an empty folder of this process alone, which takes all files.
        on_progress: shows a line of text as each unit begins, and while units compile for long.

    Raises:
        NoCompiler: this machine has no compiler.
        BuildFailed: no compiler could compile the base unit and link.
        OSError: a file could not be written.
    """
    failures: list[str] = []
    tried: list[str] = []
    for compiler in find_compilers():
        tried.append(compiler.identity)
        try:
            return _build(source, source.units_for(machine), compiler, folder, on_progress, tuple(tried))
        except BuildFailed as error:
            failures.append(str(error))
            _log.warning("%s", error)
    if not tried:
        raise NoCompiler(f"This machine has no C compiler: {install_hint()}.")
    raise BuildFailed(failures[0])


def _build(
    source: NativeSource,
    units: tuple[NativeUnit, ...],
    compiler: Compiler,
    folder: Path,
    on_progress: Say,
    tried: tuple[str, ...],
) -> BuiltLibrary:
    includes = tuple(f"-I{path}" for path in sorted({header.absolute().parent for header in source.headers}))
    begun = count(1)

    def compile_unit(unit: NativeUnit) -> str | None:
        on_progress(f"compiling native {source.name}: {unit.name} ({next(begun)} of {len(units)}) ...")
        return compiler.run(
            [*COMMON_FLAGS, *includes, *unit.flags, "-MMD", "-c", str(unit.source.absolute()), "-o", f"{unit.name}.o"],
            folder,
        )

    with ThreadPoolExecutor(min(len(units), usable_cores())) as threads:
        running = {unit.name: threads.submit(compile_unit, unit) for unit in units}
        _report_until_done(running, lambda names: on_progress(f"compiling native {source.name}: still {names} ..."))
    results = {name: future.result() for name, future in running.items()}
    refused = {name: messages for name, messages in results.items() if messages is not None}
    for name, messages in refused.items():
        if name == units[0].name or any(words in messages for words in _PASSING):
            raise BuildFailed(f"{compiler.identity} could not compile {name} of {source.name}: {_shown(messages)}")
        _log.warning(
            "%s cannot compile %s of %s, which is left out: %s", compiler.identity, name, source.name, _shown(messages)
        )
    _require_declared(source, folder)
    accepted = tuple(name for name in results if name not in refused)
    library = folder / f"{source.name}.so"
    objects = [f"{name}.o" for name in accepted]
    failure = compiler.run([*objects, *LINK_FLAGS, *source.link_flags, "-o", str(library)], folder)
    if failure is not None:
        raise BuildFailed(f"{compiler.identity} could not link {source.name}: {_shown(failure)}")
    omitted = tuple((name, _shown(messages)) for name, messages in refused.items())
    return BuiltLibrary(library, accepted, omitted, compiler.identity, tried)


def _report_until_done(running: Mapping[str, Future[str | None]], say: Say) -> None:
    """Returns when all have ended; every few seconds it says the names of those that have not, and the time so far."""
    begun, left = time.monotonic(), set(running.values())
    while left := wait(left, _SILENCE).not_done:
        names = ", ".join(name for name, future in running.items() if future in left)
        say(f"{names} after {time.monotonic() - begun:.0f} s")


def _require_declared(source: NativeSource, folder: Path) -> None:
    """Raises BuildFailed if a unit includes a file of ours that is not part of the key: a change would go unseen."""
    declared = {os.path.realpath(path) for path in (*source.headers, *(unit.source for unit in source.units))}
    ours = {os.path.dirname(path) for path in declared}
    for rule in sorted(folder.glob("*.d")):  # "unit.o: source.c header.h", as the compiler writes it for make
        included = {os.path.realpath(name) for name in shlex.split(rule.read_text().partition(":")[2])}
        for path in sorted(included - declared):
            if os.path.dirname(path) in ours:
                raise BuildFailed(f"{rule.stem} of {source.name} includes {path}, which is not among its headers.")


def _shown(messages: str) -> str:
    """Returns the lines that name an error, or else all, cut to a length that people read."""
    lines = [line for line in messages.splitlines() if "error" in line.lower()] or messages.splitlines()
    text = " ".join(line.strip() for line in lines)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
