"""Loads a native library: from the folder of an image, from the cache, or by a build that fills the cache.

An image has all units of a library; the cache has those that this CPU can run.
"""

import logging
import platform
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from ..cpu import read_cpu
from .build import BuildFailed, NoCompiler, Say, build_library
from .cache_folders import PREBUILT_VARIABLE, candidates, make_cache_folder, prebuilt_folder
from .compiler import find_compilers
from .library_folder import LibraryFolder, LoadedLibrary
from .source import NativeSource
from .trust import Untrusted

_BUILDING: Final = ".building-"

_log = logging.getLogger(__name__)


def load_library(source: NativeSource, on_progress: Say = _log.info) -> LoadedLibrary | None:
    """Loads a library, and builds it first if no folder has it as it should be.

    Several processes may call this at once: one builds, the others wait and load.

    Args:
        on_progress: shows a line of text as each unit begins to compile; called from several threads.

    Returns:
        The library; None if it cannot be had on this machine. The log says why, once per process.
    """
    machine = platform.machine()
    if not source.units_for(machine):
        _say_once(f"tk has no native {source.name} for {machine}.")
        return None
    own = source.for_cpu(read_cpu())
    try:
        whole_stem, stem = source.stem(machine), own.stem(machine)
    except OSError as error:
        _say_once(f"The source of the native {source.name} cannot be read: {error}.")
        return None
    library = _load_prebuilt(source, whole_stem)
    try:
        return library or _load_cached(own, stem, machine, on_progress)
    except NoCompiler as error:
        _say_once(f"{error} Until then everything works without native code, on torch's kernels.")
    except BuildFailed as error:
        _say_once(f"The native {source.name} cannot be built: {error} Without it torch's kernels are used.")
    return None


def build_into(folder: LibraryFolder, source: NativeSource, machine: str, on_progress: Say) -> None:
    """Builds a library in a folder that exists, whatever it holds. The caller holds the folder's lock.

    Raises:
        BuildFailed: the library cannot be built.
        OSError: a file cannot be written.
    """
    for leftover in folder.path.glob(f"{_BUILDING}*"):  # of processes that died while they held the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=folder.path, ignore_cleanup_errors=True) as workshop:
        folder.add(source.stem(machine), build_library(source, machine, Path(workshop), on_progress))


def _load_prebuilt(source: NativeSource, stem: str) -> LoadedLibrary | None:
    folder = prebuilt_folder()
    if folder is None:
        return None
    try:
        library = folder.load(stem)
        reason = "it has none of this version of tk"
    except (Untrusted, OSError) as error:
        library, reason = None, str(error)
    if library is None:
        _say_once(f"{PREBUILT_VARIABLE}={folder.path} is not used for the native {source.name}: {reason}")
    return library


def _load_cached(source: NativeSource, stem: str, machine: str, on_progress: Say) -> LoadedLibrary | None:
    for path in candidates():
        try:
            return _load_or_build(make_cache_folder(path), source, stem, machine, on_progress)
        except (Untrusted, OSError) as error:
            _log.warning("%s cannot keep the native %s: %s", path, source.name, error)
    _say_once(f"No folder can keep the native {source.name}: without it torch's kernels are used.")
    return None


def _load_or_build(
    folder: LibraryFolder, source: NativeSource, stem: str, machine: str, on_progress: Say
) -> LoadedLibrary:
    """Raises Untrusted, OSError or BuildFailed if the folder has no library afterwards."""
    library = _load_fresh(folder, stem, logging.DEBUG)
    if library is not None:
        return library
    with folder.locked():
        library = _load_fresh(folder, stem, logging.WARNING)  # another process may have built it meanwhile
        if library is not None:
            return library
        if next(find_compilers(), None):
            # A warning, so that programs that only import tk show it: they wait here, up to a minute on a busy machine.
            _log.warning("The native %s of tk is compiled for this machine, once: later starts load it.", source.name)
        build_into(folder, source, machine, on_progress)
    library = folder.load(stem)
    if library is None:
        raise Untrusted(f"{folder.path / stem}.so disappeared after it was built.")
    return library


def _load_fresh(folder: LibraryFolder, stem: str, level: int) -> LoadedLibrary | None:
    """Returns a library that needs no build; logs, at a level, why a library that is there needs one."""
    try:
        record = folder.record(stem)
        if record is None:
            return None
        compiler = next(find_compilers(), None) if record.omitted else None
        if compiler is None or compiler.identity in record.tried:
            return folder.load(stem)
        reason = f"{compiler.identity} may compile {', '.join(name for name, _ in record.omitted)}, which it lacks"
    except Untrusted as error:
        reason = str(error)
    _log.log(level, "The native library %s is built again: %s", stem, reason)
    return None


@cache
def _say_once(message: str) -> None:
    _log.warning("%s", message)
