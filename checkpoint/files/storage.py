"""Open files: every read and write of a checkpoint's bytes.

All system calls go through this module, `folders`, `lookup`, `disk_facts` and `locks`, so that tests can make each of
them fail. A system error becomes a `StorageError` that names the file; it never counts as damage.
"""

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from ...core.errors import CheckpointError, ShardCorrupt, ShardMissing
from . import lookup
from .storage_errors import error_context

_RWF_DONTCACHE: Final = 0x80  # of Linux 6.14's uapi/linux/fs.h
_UNNAMED: Final = ".tk-unnamed-"
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # Linux


class FileState(NamedTuple):
    """The inode of a file, its bytes, and the ns of its last write and of its last change of any kind.

    The first three stay the same if the file gets another name or other permissions. The last one cannot be set back.
    """

    inode: int
    size: int
    modified: int
    changed: int

    @property
    def content(self) -> tuple[int, int, int]:
        """The part that changes only if the file is written or replaced, and its time is not set back."""
        return self.inode, self.size, self.modified


def open_read(path: Path) -> int:
    """Opens a regular file for reading and returns its descriptor.

    Raises:
        ShardMissing: the file does not exist.
        CheckpointError: the path is a folder, a device or a link.
        StorageError: the system refuses to open the file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with error_context(path, "opened"):
        try:
            fd = lookup.find(path, lambda: os.open(path, flags))
        except OSError:
            if stat.S_ISREG(os.lstat(path).st_mode):
                raise
            raise _not_regular(path) from None
    if fd is None:
        raise ShardMissing(f"{path} is missing. Copy or download the whole checkpoint again, or use another one.")
    with error_context(path, "looked at"), _closing_on_error(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(path)
    return fd


def _not_regular(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a link, folder or device, not a regular file. Put the file itself there.")


def open_new(path: Path) -> int:
    """Makes a file, which must not exist yet, and returns a descriptor for writing it."""
    with error_context(path, "made"):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def open_again(path: Path) -> int:
    """Opens a file that `open_new` made, to write more of it."""
    with error_context(path, "opened"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def open_unnamed(folder: Path) -> int:
    """Makes a file without a name, which ends with its last descriptor; returns one for reading and writing it.

    Where the file system has no such files, the file loses its name at once. A process that is killed in between leaves
    the name; the next call for the folder removes it.
    """
    with error_context(folder, "given a file without a name"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        for left in folder.glob(f"{_UNNAMED}*"):
            _unlink(left)
        path = folder / f"{_UNNAMED}{os.getpid()}-{threading.get_ident()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _unlink(path)
    return fd


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):  # another process that makes such a file removes it, too
        os.unlink(path)


def open_direct(fd: int) -> int | None:
    """Opens the file of a descriptor once more, for reads and writes past the page cache; None if it cannot be."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | _O_DIRECT) if _O_DIRECT else None
    except OSError:
        return None


def reserve(fd: int, size: int) -> None:
    """Gives a file `size` bytes of disk, so that no later write finds the disk full; new bytes are 0."""
    with error_context(fd, f"given {size} bytes"):
        os.posix_fallocate(fd, 0, size)


def close(fd: int) -> None:
    """Closes a descriptor."""
    os.close(fd)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        close(fd)


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """Opens a file for reading, and closes it at the end of the block."""
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
    """Returns the number of bytes in an open file."""
    return file_state(fd).size


def file_state(fd: int) -> FileState:
    """Returns the state of an open file."""
    with error_context(fd, "looked at"):
        found = os.fstat(fd)
    return FileState(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def state_of(path: Path) -> FileState:
    """Returns the state of a file by its path. Raises the errors of `open_read`."""
    with reading(path) as fd:
        return file_state(fd)


def pread(fd: int, buffer: memoryview, offset: int, once: bool = False) -> int:
    """Reads into `buffer` until it is full or the file ends; returns the number of bytes read.

    Args:
        once: the bytes are not needed again soon, so the page cache need not keep those that it does not hold yet.
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
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # old kernel or file system
                raise
    return os.preadv(fd, [buffer], offset)


def read_exact(fd: int, buffer: memoryview, offset: int, path: Path, once: bool = False) -> None:
    """Fills `buffer` from `offset`; ShardCorrupt if the file ends before. For `once` see `pread`."""
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
    """Switches direct writes of a descriptor, past the page cache, on or off; False if the file system has none."""
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
