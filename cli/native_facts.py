"""Facts about native code that `tk doctor` reports: the compiler, the cache, and the libraries that are built."""

import platform
from collections.abc import Iterator, Sequence

from ..core.cpu import read_cpu
from ..core.native import NativeSource
from ..core.native.compiler import find_compilers, install_hint
from ..core.native.installed import cache_folder, find_installed
from .machine import Fact


def native_facts(sources: Sequence[NativeSource]) -> Iterator[Fact]:
    """Yields the facts about a compiler, the cache of libraries, and each library of `sources`."""
    yield _compiler()
    folder, reasons = cache_folder()
    value = f"compiled to {folder}" if folder else "no folder can keep it"
    yield Fact("tk uses", "native code", value, "note" if reasons else "ok", " ".join(reasons))
    yield from map(_library, sources)


def _compiler() -> Fact:
    compiler = next(find_compilers(), None)
    if compiler:
        return Fact("software", "C compiler", compiler.identity)
    hint = f"without one, serving on a CPU uses torch's kernels, which are slower: {install_hint()}"
    return Fact("software", "C compiler", "none", "note", hint)


def _library(source: NativeSource) -> Fact:
    found = find_installed(source)
    if found.record is None:
        value = "not built yet: the first use builds it"
    else:
        flags = {unit.name: unit.flags for unit in source.units_for(platform.machine())}
        units = [_unit(name, flags.get(name, ())) for name in found.record.units]
        units += [f"{name} (the compiler refused it)" for name, _ in found.record.omitted]
        value = f"{', '.join(units)}; {found.path}"
    hint = " ".join(found.reasons)
    return Fact("tk uses", f"native {source.name}", value, "note" if hint else "ok", hint)


def _unit(name: str, flags: Sequence[str]) -> str:
    lacks = read_cpu().lacks(flags)
    return f"{name} (this CPU lacks {', '.join(lacks)})" if lacks else name
