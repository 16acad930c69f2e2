"""The built libraries that `load_library` would find on this machine, for reports; nothing is made or loaded."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ..cpu import read_cpu
from .cache_folders import candidates, prebuilt_folder, why_unusable
from .library_folder import LibraryFolder
from .record import LibraryRecord
from .source import NativeSource
from .trust import Untrusted


@dataclass(frozen=True, slots=True)
class InstalledLibrary:
    """A library as it is, or is not, in the folders.

    Attributes:
        path: the file; None if no folder has the library as it was built.
        record: its record, if there is one.
        reasons: why libraries that are there are not used, a sentence each.
    """

    path: Path | None
    record: LibraryRecord | None
    reasons: tuple[str, ...]


def find_installed(source: NativeSource) -> InstalledLibrary:
    """Looks for a library where `load_library` does. Raises OSError if its source cannot be read."""
    machine = platform.machine()
    whole_stem, own_stem = source.stem(machine), source.for_cpu(read_cpu()).stem(machine)
    prebuilt = prebuilt_folder()
    folders = [prebuilt] if prebuilt else []
    folders += [LibraryFolder(path, frozenset({os.geteuid()})) for path in candidates()]
    reasons: list[str] = []
    for folder in folders:
        stem = whole_stem if folder is prebuilt else own_stem
        try:
            record = folder.record(stem)
        except (Untrusted, OSError) as error:
            if folder is prebuilt or not isinstance(error, FileNotFoundError):
                reasons.append(str(error))
            continue
        if record:
            return InstalledLibrary(folder.path / f"{stem}.so", record, tuple(reasons))
    return InstalledLibrary(None, None, tuple(reasons))


def cache_folder() -> tuple[Path | None, tuple[str, ...]]:
    """Returns the folder that new libraries would be kept in, or None; and why better ones cannot be used."""
    reasons: list[str] = []
    for path in candidates():
        reason = why_unusable(path)
        if not reason:
            return path, tuple(reasons)
        reasons.append(reason)
    return None, tuple(reasons)
