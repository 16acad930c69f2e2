"""System errors reported as a `StorageError` that names the file, the cause and a remedy."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...core.errors import StorageError

_AT_FAULT: Final = "The disk or the network file system is at fault: see the system's log, then try again."
_RIGHTS: Final = "This user needs the right to do that: change the permissions, or run as another user."
_REMOVE: Final = "That disk has space, but takes no more files (df -i shows its inodes): remove some."
_ADVICE: Final = MappingProxyType(
    {
        errno.EACCES: _RIGHTS,
        errno.EPERM: _RIGHTS,
        errno.EROFS: "The file system is mounted read-only: remount it, or use another folder.",
        errno.EMFILE: "This process has too many files open: raise its limit (ulimit -n).",
        errno.ENFILE: "This machine has too many files open: close some.",
        errno.ENOMEM: "This machine is out of memory: end other processes.",
        errno.ELOOP: "A link there leads back to itself: make it lead to the file that it stands for, or remove it.",
        errno.ENOSPC: "Free some space on that disk.",
        errno.EDQUOT: "Free some space, or raise the quota.",
        errno.EIO: _AT_FAULT,
        errno.ESTALE: _AT_FAULT,
        errno.ETIMEDOUT: _AT_FAULT,
        # A reader meets it only for a name that its folder lists (see `lookup`), a writer for a folder that has gone.
        errno.ENOENT: f"If its folder was not moved or removed meanwhile: {_AT_FAULT[0].lower()}{_AT_FAULT[1:]}",
    }
)


@contextmanager
def error_context(file: Path | int, action: str) -> Iterator[None]:
    """Raises system errors as `StorageError`s that name the file and the action that failed.

    Args:
        file: a path or a descriptor.
        action: a participle, as in "FILE cannot be opened".
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        path = _path_of(file) if isinstance(file, int) else file
        reason = f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, error.errno)})"
        lacks_inodes = error.errno == errno.ENOSPC and _lacks_inodes(Path(path))
        advice = _REMOVE if lacks_inodes else _ADVICE.get(error.errno or 0, "")
        raise StorageError(f"{path} cannot be {action}: {reason}. {advice}".rstrip(), error.errno) from error


def _lacks_inodes(path: Path) -> bool:
    """Returns whether the file system of a path, which need not exist, takes no more files whatever their size."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            system = os.statvfs(folder)
            return system.f_files > 0 and system.f_favail == 0
    return False


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file {fd}"
