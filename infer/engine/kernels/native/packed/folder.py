"""A folder of packed weights (`--packed`): a file per rank, named by all that decides its bytes.

Servers on one machine that serve the same weights at the same layout map the same files. So the weights are in memory
once, and a later start neither reads nor packs them again.
"""

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ......core.casts import Array
from ......core.errors import ConfigError
from ......core.native.trust import Untrusted, open_file, open_folder
from ......core.progress import format_bytes
from .arrays_file import DamagedArrays, map_arrays, write_arrays

SUFFIX: Final = ".packed"
LOCK: Final = ".lock"
KEPT: Final = 2  # models that no server uses and whose files stay for a later start
_OURS: Final = re.compile(r"[0-9a-f]{32}\.(lock|[0-9]+\.\w+)")  # all other files in the folder stay
_LOG: Final = logging.getLogger(__name__)


class PackedFolder:
    """A folder that only this user or root may write.

    Args:
        path: the folder, or a link to it; it is made if it is missing.

    Raises:
        ConfigError: it cannot be made, or another user may write it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._owners = frozenset({0, os.geteuid()})
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(open_folder(self.path, self._owners))
        except (Untrusted, OSError) as error:
            raise ConfigError(f"--packed {path} cannot hold packed weights: {error}") from error

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Holds the lock of a model's files, which ends with the process; waits while another server packs it.

        Raises:
            ConfigError: the file system has no locks, or the folder cannot be written.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path / f"{key}{LOCK}", flags, 0o600)
        except OSError as error:
            raise ConfigError(f"--packed {self.path} cannot be written: {error}") from error
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    def find(self, key: str, rank: int, about: Mapping[str, str], threads: int) -> dict[str, Array] | None:
        """Maps a rank's arrays, and checks them; None if there are none that can be used, which the log explains.

        Raises:
            ConfigError: another user may have written the file.
        """
        path = self._file(key, rank)
        try:
            descriptor = self._open(path)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # in use, as long as it is mapped: see `remove_old`
            with suppress(OSError):
                os.utime(descriptor)
            return map_arrays(descriptor, about, threads)
        except (DamagedArrays, OSError) as error:
            _LOG.warning("%s cannot be used, so the weights are packed again: %s.", path, error)
            return None
        finally:
            os.close(descriptor)

    def add(self, key: str, rank: int, arrays: Mapping[str, Array], about: Mapping[str, str]) -> None:
        """Writes a rank's arrays; the file has its name when it is whole.

        Raises:
            ConfigError: the file cannot be written.
        """
        size = sum(values.nbytes for values in arrays.values())
        _LOG.info("Writes %s of packed weights to %s, for later starts.", format_bytes(size), self.path)
        partial = Path()
        try:
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=f"{key}.{rank}.", delete=False) as file:
                partial = Path(file.name)
                write_arrays(file, arrays, about)
            partial.replace(self._file(key, rank))
        except OSError as error:
            if partial.name:
                partial.unlink(missing_ok=True)
            raise ConfigError(
                f"--packed {self.path} has no room for the packed weights of a rank, {format_bytes(size)}: "
                f"{error.strerror or error}. Free space there, name another folder, or start without --packed."
            ) from error

    def remove_old(self, key: str) -> None:
        """Removes files of models that no server has mapped, except for those of `key` and of the last `KEPT` ones.

        The caller holds the lock of `key`, and no rank writes. So a file of `key` without `SUFFIX` is one of a server
        that ended while it wrote.
        """
        models: dict[str, list[Path]] = {}
        for path in self.path.iterdir():
            if _OURS.fullmatch(path.name):
                models.setdefault(path.name.partition(".")[0], []).append(path)
        for path in models.pop(key, []):
            if path.suffix not in (SUFFIX, LOCK):
                path.unlink(missing_ok=True)
        unused = [paths for paths in models.values() if all(map(_is_unlocked, paths))]
        unused.sort(key=lambda paths: max(map(_last_use, paths)), reverse=True)
        for path in (path for paths in unused[KEPT:] for path in paths):
            with suppress(OSError):  # another server may remove it, too
                path.unlink()

    def _open(self, path: Path) -> int:
        try:
            folder = open_folder(path.parent, self._owners)
            try:
                return open_file(path, folder, self._owners)
            finally:
                os.close(folder)
        except Untrusted as error:
            raise ConfigError(f"Packed weights cannot be used: {error}") from error

    def _file(self, key: str, rank: int) -> Path:
        return self.path / f"{key}.{rank}{SUFFIX}"


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _LOG.info("Waits for another server, which packs these weights into %s.", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"--packed {folder} is on a file system without locks: {error}. Name another folder."
        ) from error


def _is_unlocked(path: Path) -> bool:
    """Whether no server packs, or has mapped, what this file is for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _last_use(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
