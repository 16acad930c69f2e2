"""Changes to names in folders: make, move, exchange, remove. The names are durable once `fsync_dir` returns."""

import ctypes
import errno
import os
import stat
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Final

from ...core.errors import StorageError
from . import lookup
from .storage_errors import error_context

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def make_dir(path: Path) -> None:
    """Makes a folder; no error if the folder exists."""
    with error_context(path, "made"):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise


def make_dirs(path: Path) -> None:
    """Makes a folder and its missing parents, durably; no error if the folder exists."""
    missing = list(takewhile(lambda folder: not lookup.is_dir(folder), (path, *path.parents)))
    for folder in reversed(missing):
        make_dir(folder)
        fsync_dir(folder.parent)


def fsync_dir(path: Path) -> None:
    """Makes a folder's entries durable."""
    with error_context(path, "made durable"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Moves a file to `target`, which it replaces, or a folder to a name that is free or an empty folder."""
    with error_context(source, f"moved to {target}"):
        os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Makes a hard link: a second name of the same file."""
    with error_context(source, f"linked as {target}"):
        os.link(source, target)


def exchange(one: Path, two: Path) -> None:
    """Swaps two folders in one operation: at no time is either name free.

    Raises:
        StorageError: with EINVAL or ENOSYS if the file system has no exchange.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two))
    with error_context(one, f"exchanged with {two}"):
        if call is None or call(*names, _RENAME_EXCHANGE) != 0:
            number = ctypes.get_errno() if call else errno.ENOSYS
            raise OSError(number, os.strerror(number))


def swap(new: Path, old: Path, spare: Path) -> None:
    """Exchanges the names of a complete new folder and an old one, durably.

    If the file system has no exchange, a crash can leave the old folder under the name `spare`.
    """
    try:
        exchange(new, old)
    except StorageError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        rename(old, spare)
        rename(new, old)
        rename(spare, new)
    fsync_dir(old.parent)


def remove_file(path: Path) -> None:
    """Removes a file, if it exists."""
    with error_context(path, "removed"), suppress(FileNotFoundError):
        os.unlink(path)


def remove_dir(path: Path) -> None:
    """Removes an empty folder, if it exists."""
    with error_context(path, "removed"), suppress(FileNotFoundError):
        os.rmdir(path)


def remove_tree(path: Path) -> None:
    """Removes a folder and its content, or a file; links are removed, never followed.

    Another process may add or remove files at the same time, so the folder is listed again until it is empty.
    """
    with error_context(path, "removed"):
        found = lookup.find(path, lambda: os.lstat(path))
    if found is None or not stat.S_ISDIR(found.st_mode):
        remove_file(path)
        return
    for pause in (*lookup.PAUSES, 0.5, 1.0, 2.0, None):
        for name in lookup.list_names(path):
            remove_tree(path / name)
        try:
            return remove_dir(path)
        except StorageError as error:
            if pause is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
        time.sleep(pause)
