"""Opens files and folders that no other user may have written; code that is loaded comes from nowhere else."""

import errno
import os
import stat
from pathlib import Path

from ..errors import TkError


class Untrusted(TkError):
    """A file or folder that another user may have written, or that is not what it should be."""


def open_folder(path: Path, owners: frozenset[int]) -> int:
    """Opens a folder for use as `dir_fd`.

    Args:
        owners: the user ids that may own the folder.

    Raises:
        Untrusted: it is a link, belongs to another user, or may be written by others.
        OSError: it cannot be opened, for example because it does not exist.
    """
    return _open(path, os.O_DIRECTORY, None, owners)


def open_file(path: Path, folder_fd: int, owners: frozenset[int]) -> int:
    """Opens a regular file, which is in an open folder, for reading.

    The descriptor reads the file that was checked, whatever happens to the name.

    Raises:
        Untrusted: it is a link or no file, belongs to another user, or may be written by others.
        OSError: it cannot be opened, for example because it does not exist.
    """
    fd = _open(path, os.O_NONBLOCK, folder_fd, owners)  # O_NONBLOCK: opening a named pipe must not wait
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Untrusted(f"{path} is not a file.")
    return fd


def _open(path: Path, flags: int, folder_fd: int | None, owners: frozenset[int]) -> int:
    name = path if folder_fd is None else path.name
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, dir_fd=folder_fd)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink()):
            raise Untrusted(f"{path} is a link.") from error
        if isinstance(error, PermissionError):
            raise Untrusted(f"{path} cannot be read by this user.") from error
        raise
    try:
        _check(path, os.fstat(fd), owners)
    except Untrusted:
        os.close(fd)
        raise
    return fd


def _check(path: Path, status: os.stat_result, owners: frozenset[int]) -> None:
    if status.st_uid not in owners:
        raise Untrusted(f"{path} belongs to the user {status.st_uid}, and this process runs as {os.geteuid()}.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise Untrusted(f"{path} may be written by other users (mode {mode:o}): chmod go-w {path}")
