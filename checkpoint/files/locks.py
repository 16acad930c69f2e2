"""Locks of files and folders (flock), which the kernel gives back when a process dies. Some file systems have none, and
on some each host has its own."""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .storage_errors import error_context

_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LOG_AFTER: Final = 1.0  # seconds of waiting
_MAX_WAIT: Final = 10.0  # seconds, for a folder that some other program has locked
_PAUSE: Final = 0.01  # seconds

_log = logging.getLogger(__name__)


def open_lock(path: Path) -> int:
    """A descriptor of a file to be locked, which is made if it is missing."""
    with error_context(path, "opened"):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def try_lock(fd: int) -> bool | None:
    """Locks an open file or folder until its descriptor is closed or the process dies, without waiting.

    Returns:
        False if another process has it; None where the file system has no locks.
    """
    with error_context(fd, "locked"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return None
    return True


def write_note(fd: int, data: bytes) -> None:
    """Puts data at the start of an open lock file, where other hosts see it; nothing empties the file."""
    with error_context(fd, "written"):
        if data:
            os.pwrite(fd, data, 0)
        else:
            os.ftruncate(fd, 0)
        os.fsync(fd)


def touch(fd: int) -> None:
    """Renews a lock file's time of change."""
    with error_context(fd, "touched"):
        os.utime(fd)


def last_change(path: Path) -> int:
    """A lock file's time of change, as its server has it now: in nanoseconds, to be compared with itself alone."""
    with error_context(path, "looked at"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # by which a network file system asks anew
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)


def lock_folder(path: Path) -> int | None:
    """Locks a folder until the descriptor is closed or the process dies; None if another holds it, or it cannot be."""
    fd = _open_folder(path)
    if try_lock(fd):
        return fd
    os.close(fd)
    return None


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Has a folder to oneself among those who lock it for a moment, as far as the file system can.

    Another program may have locked it for as long as it likes: that is waited for, said, and then done without.
    """
    fd = _open_folder(path)
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


def _open_folder(path: Path) -> int:
    with error_context(path, "opened"):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
