"""Locks of files and folders, which the kernel gives back when a process dies (flock)."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .storage_errors import naming


def lock_exclusive(path: Path) -> int | None:
    """Locks a file (made if missing) until its descriptor is closed or the process dies; None if another holds it."""
    with naming(path, "locked"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
    return fd


def lock_folder(path: Path, wait: bool = False) -> int | None:
    """Locks a folder until the descriptor is closed or the process dies; None if another holds it, or it cannot be."""
    with naming(path, "opened"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held, or a network file system that locks no folders
        os.close(fd)
        return None
    return fd


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Has a folder to oneself among those who lock it, as far as the file system can."""
    fd = lock_folder(path, wait=True)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)
