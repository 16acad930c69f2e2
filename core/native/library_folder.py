"""A folder of built libraries, each with its record: every byte of a library is checked before it is loaded."""

import ctypes
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from ..cpu import read_cpu
from .build import BuiltLibrary
from .record import LibraryRecord
from .trust import Untrusted, open_file, open_folder

_LOCK: Final = ".lock"
_MAX_WAIT: Final = 900.0  # seconds; the lock of a stopped process does not keep others from building
_PAUSE: Final = 0.02  # seconds
_MAX_BYTES: Final = 64 << 20  # of a file that is read; ours have less than a hundredth
_KEPT: Final = 8  # libraries of one name: those of a few checkouts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A native library in this process.

    Attributes:
        library: the library's functions.
        units: the names of the units in it, the base first.
        omitted: the names of the units that the compiler refused, each with its messages.
        compiler: the name and version of the compiler that built it.
        path: the file.
    """

    library: ctypes.CDLL
    units: tuple[str, ...]
    omitted: tuple[tuple[str, str], ...]
    compiler: str
    path: Path

    @property
    def best_unit(self) -> str:
        """The last unit named as an instruction set that this CPU has; else the base."""
        able = read_cpu().instruction_sets
        return next((name for name in reversed(self.units) if name in able), self.units[0])


@dataclass(frozen=True, slots=True)
class LibraryFolder:
    """A folder of libraries that only its owner may write.

    Attributes:
        path: the folder.
        owners: the user ids that may own the folder and its files.
    """

    path: Path
    owners: frozenset[int]

    def record(self, stem: str) -> LibraryRecord | None:
        """Returns the record of a library whose bytes are those that were built; None if there is no such library.

        Raises:
            Untrusted: the folder or a file is damaged, or another user may have written it.
            OSError: the folder or a file cannot be read.
        """
        found = self._open(stem)
        if found is None:
            return None
        os.close(found[1])
        return found[0]

    def load(self, stem: str) -> LoadedLibrary | None:
        """Loads a library after the checks of `record`; None if it is not there.

        Raises:
            Untrusted: as in `record`; or the system refuses the library, for example if it was built for a newer libc.
            OSError: the folder or a file cannot be read.
        """
        found = self._open(stem)
        if found is None:
            return None
        record, fd = found
        with suppress(OSError):
            os.utime(fd)  # in use: `add` removes those that were not for the longest time
        path = self.path / f"{stem}.so"
        library = _load(fd, path)
        return LoadedLibrary(library, record.units, record.omitted, record.compiler, path)

    def add(self, stem: str, built: BuiltLibrary) -> None:
        """Moves a library that was built inside this folder to its name, and removes old ones of the same source.

        The caller holds the lock. A process that dies in between leaves a library that does not match its record.

        Raises:
            OSError: a file cannot be written.
        """
        data = built.path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        record = LibraryRecord(built.units, built.omitted, built.compiler, built.tried, len(data), digest)
        written = built.path.with_suffix(".json")
        written.write_bytes(record.to_json())
        for path in (built.path, written):
            path.chmod(0o644)
            path.replace(self.path / f"{stem}{path.suffix}")
        self._remove_old(stem)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock, which the system releases when a process dies; waits while another one builds.

        Without locks in the file system, and behind a process that does not end, several may build the same library:
        the last one's stays.

        Raises:
            OSError: the lock file cannot be made.
        """
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(fd, self.path)
            yield
        finally:
            os.close(fd)

    def _open(self, stem: str) -> tuple[LibraryRecord, int] | None:
        """Returns a library's record and its open file, checked against each other; None if one is missing."""
        folder_fd = open_folder(self.path, self.owners)
        try:
            record_fd = open_file(self.path / f"{stem}.json", folder_fd, self.owners)
            try:
                data = _read(record_fd)
            finally:
                os.close(record_fd)
            fd = open_file(self.path / f"{stem}.so", folder_fd, self.owners)
        except FileNotFoundError:
            return None
        finally:
            os.close(folder_fd)
        try:
            return self._checked(stem, data, _read(fd)), fd
        except (Untrusted, OSError):
            os.close(fd)
            raise

    def _checked(self, stem: str, record_data: bytes, library: bytes) -> LibraryRecord:
        path = self.path / stem
        try:
            record = LibraryRecord.from_json(record_data)
        except ValueError as error:
            raise Untrusted(f"{path}.json is damaged: {error}") from error
        if len(library) != record.size or hashlib.sha256(library).hexdigest() != record.sha256:
            raise Untrusted(f"{path}.so is not the library that was built: its bytes have changed.")
        return record

    def _remove_old(self, stem: str) -> None:
        name = stem.rpartition("-")[0]
        libraries = [path for path in self.path.glob("*.so") if path.stem.rpartition("-")[0] == name]
        libraries.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
        for path in libraries[_KEPT:]:
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def _read(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read(_MAX_BYTES)


def _lock(fd: int, folder: Path) -> None:
    begun, said = time.monotonic(), False
    while time.monotonic() - begun < _MAX_WAIT:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                _log.info("Waiting for another process, which compiles native code in %s.", folder)
                said = True
            time.sleep(_PAUSE)
        except OSError as error:
            _log.warning("%s has no locks (%s); going on without.", folder, error)
            return
        else:
            return
    _log.warning("%s stays locked by another process; going on without its lock.", folder)


def _load(fd: int, path: Path) -> ctypes.CDLL:
    """Loads the library that a descriptor reads, which becomes its own; the file was checked, and its name was not.

    The loader knows a library by the name of its descriptor, and compares names first. So the descriptor of a file that
    is loaded for the first time stays open, and later loads of that file use it.
    """
    status = os.fstat(fd)
    places, file = _places(), (status.st_dev, status.st_ino)
    if file in places:
        os.close(fd)
        return ctypes.CDLL(places[file])
    place = f"/proc/self/fd/{fd}"
    try:
        library = ctypes.CDLL(place)
    except OSError as error:
        os.close(fd)
        raise Untrusted(f"The system cannot load {path}: {str(error).replace(place, path.name)}") from error
    places[file] = place
    return library


@cache
def _places() -> dict[tuple[int, int], str]:
    """The names by which this process has loaded files, by device and inode, which open files keep."""
    return {}
