"""Open files: every read and write of a checkpoint's bytes.

All calls to the system go through this module, `folders`, `lookup`, `disk_facts` and `locks`, so that tests can make
each of them fail. What the system refuses is a `StorageError` that names the file; it never counts as damage.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ShardCorrupt, ShardMissing
from . import lookup
from .storage_errors import error_context

_RWF_DONTCACHE: Final = 0x80  # of Linux 6.14's uapi/linux/fs.h
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # Linux


def open_read(path: Path) -> int:
    """A descriptor for reading a regular file.

    Raises:
        ShardMissing: there is no such file.
        CheckpointError: it is a folder, a device or a link.
        StorageError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with error_context(path, "opened"):
        try:
            fd = lookup.find(path, lambda: os.open(path, flags))
        except OSError:
            if stat.S_ISREG(os.lstat(path).st_mode):
                raise
            raise CheckpointError(f"{path} is not a regular file, as it must be; links are not followed.") from None
    if fd is None:
        raise ShardMissing(f"{path} is missing.")
    with error_context(path, "looked at"), _closing_on_error(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is not a regular file, as it must be.")
    return fd


def open_new(path: Path) -> int:
    """A descriptor for writing a file that must not exist yet."""
    with error_context(path, "made"):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def open_again(path: Path) -> int:
    """A descriptor for writing more of a file that `open_new` made."""
    with error_context(path, "opened"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def close(fd: int) -> None:
    """Closes a descriptor."""
    os.close(fd)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """A descriptor, closed at the end."""
    try:
        yield fd
    finally:
        close(fd)


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """A descriptor for reading, closed at the end."""
    with closing(open_read(path)) as fd:
        yield fd


@contextmanager
def _closing_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close(fd)
        raise


def file_size(fd: int) -> int:
    """Bytes in an open file."""
    with error_context(fd, "looked at"):
        return os.fstat(fd).st_size


def pread(fd: int, buffer: memoryview, offset: int, once: bool = False) -> int:
    """Reads into `buffer` until it is full or the file ends; the number of bytes read.

    Args:
        once: nobody will read these bytes again soon, so what the page cache does not have yet it need not keep.
    """
    done = 0
    with error_context(fd, "read"):
        while done < len(buffer):
            count = _preadv(fd, buffer[done:], offset + done, once)
            if count == 0:
                break
            done += count
    return done


def _preadv(fd: int, buffer: memoryview, offset: int, once: bool) -> int:
    if once:
        try:
            return os.preadv(fd, [buffer], offset, _RWF_DONTCACHE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # kernels and file systems that do not know it
                raise
    return os.preadv(fd, [buffer], offset)


def read_exact(fd: int, buffer: memoryview, offset: int, path: Path, once: bool = False) -> None:
    """Fills `buffer` from `offset`, as `pread`; ShardCorrupt if the file ends before."""
    count = pread(fd, buffer, offset, once)
    if count != len(buffer):
        raise ShardCorrupt(f"{path} ends at byte {offset + count}; bytes up to {offset + len(buffer)} are needed.")


def pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    done = 0
    with error_context(fd, "written"):
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)


def set_direct(fd: int, direct: bool) -> bool:
    """Has later writes of a descriptor pass the page cache by, or not; False where the file system cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (_O_DIRECT if direct else 0))
    except OSError:
        return False
    return bool(_O_DIRECT)


def fsync(fd: int) -> None:
    """Makes a file's bytes durable."""
    with error_context(fd, "made durable"):
        os.fsync(fd)
