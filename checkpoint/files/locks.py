"""Locks of files and folders (flock), which the kernel releases when a process dies.

Some file systems have no locks, and on some a lock is visible to one host only.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...core.errors import StorageError
from .storage_errors import error_context

_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LOG_AFTER: Final = 1.0  # seconds of waiting
_MAX_WAIT: Final = 10.0  # seconds, for a folder that another program has locked
_PAUSE: Final = 0.01  # seconds

_log = logging.getLogger(__name__)


def open_lock(path: Path) -> int:
    """Returns a descriptor of a file to be locked; the file is made if it is missing. A link raises StorageError."""
    with error_context(path, "opened"):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise StorageError(
                    f"{path} is a link, and a lock is a file of its own: remove the link.", error.errno
                ) from error
            raise


def try_lock(fd: int) -> bool | None:
    """Locks an open file or folder until its descriptor is closed or the process dies; does not wait.

    Returns:
        True if it is locked now; False if another process holds the lock; None if the file system has no locks.
    """
    return _flock(fd, fcntl.LOCK_EX)


def try_share(fd: int) -> bool | None:
    """Locks an open file or folder together with others who share it, as `try_lock` does alone."""
    return _flock(fd, fcntl.LOCK_SH)


def _flock(fd: int, kind: int) -> bool | None:
    with error_context(fd, "locked"):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return None
    return True


def write_note(fd: int, data: bytes) -> None:
    """Writes `data` at the start of an open lock file, durably, for other hosts to read."""
    with error_context(fd, "written"):
        os.pwrite(fd, data, 0)
        os.fsync(fd)


def touch(fd: int) -> None:
    """Sets a lock file's time of change to now."""
    with error_context(fd, "touched"):
        os.utime(fd)


def last_change(path: Path) -> int:
    """Returns a lock file's time of change in nanoseconds, by its server's clock: only comparable with itself."""
    with error_context(path, "looked at"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # a network file system asks its server on open
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)


def lock_folder(path: Path) -> int | None:
    """Locks a folder until the returned descriptor is closed or the process dies.

    Returns:
        The descriptor; None if another process holds the lock or the file system has no locks.
    """
    fd = open_folder(path)
    if try_lock(fd):
        return fd
    os.close(fd)
    return None


@contextmanager
def unread_folder(path: Path) -> Iterator[bool]:
    """Yields whether no process of this host shares the folder's lock; if so, none can until the end of the block."""
    fd = open_folder(path)
    try:
        yield try_lock(fd) is not False
    finally:
        os.close(fd)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Holds the lock of a folder for a short time, as far as the file system can.

    Another program may hold the lock for long: this logs a warning, waits 10 s, and then goes on without the lock.
    """
    fd = open_folder(path)
    begun, logged = time.monotonic(), False
    try:
        while try_lock(fd) is False:
            waited = time.monotonic() - begun
            if waited > _MAX_WAIT:
                _log.warning("%s is still locked by another program; going on without its lock.", path)
                break
            if waited > _LOG_AFTER and not logged:
                logged = True
                _log.warning("Waiting for the lock of %s, which another program holds (fuser -v names it).", path)
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(fd)


def open_folder(path: Path) -> int:
    """Returns a descriptor of a folder to be locked."""
    with error_context(path, "opened"):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
