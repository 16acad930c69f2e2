"""Every touch of a checkpoint's files and folders goes through here, so that tests can inject faults in one place."""

import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ..core.errors import CheckpointError, ManifestError, ShardCorrupt, ShardMissing

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_RWF_DONTCACHE: Final = 0x80  # of Linux 6.14's uapi/linux/fs.h
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # Linux


def open_read(path: Path, follow_links: bool = False) -> int:
    """A descriptor for reading a regular file.

    Raises:
        ShardMissing: there is no such file.
        CheckpointError: it is a folder, a device, or a link where links are not followed.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise ShardMissing(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened: {error.strerror}. It must be a regular, readable file."
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file.")
    return fd


def open_new(path: Path) -> int:
    """A descriptor for writing a file that must not exist yet."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def close(fd: int) -> None:
    """Closes a descriptor."""
    os.close(fd)


def file_size(fd: int) -> int:
    """Bytes in an open file."""
    return os.fstat(fd).st_size


def free_bytes(folder: Path) -> int:
    """How many bytes more can be written beneath a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def may_write(folder: Path) -> bool:
    """Whether names can be added to a folder and removed from it."""
    return os.access(folder, os.W_OK | os.X_OK)


def mounts_beneath(folder: Path) -> list[Path]:
    """Where file systems (or single files) are mounted: the folder itself, if it is such a place, and those inside."""
    real = Path(os.path.realpath(folder))
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except FileNotFoundError:  # no Linux
        return [real] if real.is_mount() else []
    octal = re.compile(rb"\\([0-7]{3})")  # how spaces and such are written there
    places = {os.fsdecode(octal.sub(lambda code: bytes([int(code[1], 8)]), line.split()[4])) for line in lines}
    return sorted(place for place in map(Path, places) if place == real or real in place.parents)


def pread(fd: int, buffer: memoryview, offset: int, once: bool = False) -> int:
    """Reads into `buffer` until it is full or the file ends; the number of bytes read.

    Args:
        once: nobody will read these bytes again soon, so what the page cache does not have yet it need not keep.
    """
    done = 0
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


def pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    done = 0
    with _naming_the_file(fd):
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
    with _naming_the_file(fd):
        os.fsync(fd)


@contextmanager
def _naming_the_file(fd: int) -> Iterator[None]:
    """Errors of a descriptor say what file it is."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            error.filename = os.readlink(f"/proc/self/fd/{fd}")
        raise


def fsync_dir(path: Path) -> None:
    """Makes a folder's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Moves a file over `target`, or a folder to where none (or an empty one) is."""
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Gives a file a second name."""
    os.link(source, target)


def exchange(one: Path, two: Path) -> None:
    """Swaps two folders at once: at no time is either name free.

    Raises:
        OSError: EINVAL or ENOSYS where the file system cannot.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two))
    if call is None or call(*names, _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno() if call else errno.ENOSYS
        raise OSError(number, os.strerror(number), str(one), None, str(two))


def make_dir(path: Path) -> None:
    """Makes a folder; no error if it is there."""
    path.mkdir(exist_ok=True)


def remove_file(path: Path) -> None:
    """Removes a file, if it is there."""
    path.unlink(missing_ok=True)


def remove_dir(path: Path) -> None:
    """Removes an empty folder."""
    path.rmdir()


def make_dirs(path: Path) -> None:
    """Makes a folder and those above it, durably; no error if it is there."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        make_dir(folder)
        fsync_dir(folder.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it, or a file; links are removed, never followed."""
    if not path.is_dir() or path.is_symlink():
        remove_file(path)
        return
    for name in list_names(path):
        remove_tree(path / name)
    remove_dir(path)


def swap(new: Path, old: Path, spare: Path) -> None:
    """Gives a complete folder the name of another, which gets its name instead; durable.

    Where the file system cannot exchange names, a crash can leave the old one under the name `spare`.
    """
    try:
        exchange(new, old)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        rename(old, spare)
        rename(new, old)
        rename(spare, new)
    fsync_dir(old.parent)


def list_names(path: Path) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def lock_exclusive(path: Path) -> int | None:
    """Locks a file (made if missing) until its descriptor is closed or the process dies; None if another holds it."""
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
            close(fd)


def overwrite(fd: int, data: bytes) -> None:
    """Replaces the content of an open file in place; only for the lock, whose content is a note to people."""
    os.ftruncate(fd, 0)
    pwrite(fd, memoryview(data), 0)


@contextmanager
def reading(path: Path, follow_links: bool = False) -> Iterator[int]:
    """A descriptor for reading, closed at the end."""
    with closing(open_read(path, follow_links)) as fd:
        yield fd


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """A descriptor, closed at the end."""
    try:
        yield fd
    finally:
        close(fd)


def read_exact(fd: int, buffer: memoryview, offset: int, path: Path, once: bool = False) -> None:
    """Fills `buffer` from `offset`, as `pread`; ShardCorrupt if the file ends before."""
    count = pread(fd, buffer, offset, once)
    if count != len(buffer):
        raise ShardCorrupt(f"{path} ends at byte {offset + count}; bytes up to {offset + len(buffer)} are needed.")


def read_small(path: Path, max_bytes: int, follow_links: bool = False) -> bytes:
    """A whole small file; ManifestError if it is larger than `max_bytes`."""
    with reading(path, follow_links) as fd:
        size = file_size(fd)
        if size > max_bytes:
            raise ManifestError(f"{path} has {size} bytes; at most {max_bytes} are accepted.")
        data = bytearray(size)
        read_exact(fd, memoryview(data), 0, path)
        return bytes(data)


def write_small(path: Path, data: bytes) -> None:
    """A new small file, durable; its folder's entry is not."""
    fd = open_new(path)
    try:
        pwrite(fd, memoryview(data), 0)
        fsync(fd)
    finally:
        close(fd)


def replace_small(path: Path, data: bytes, attempt: str) -> None:
    """A small file that appears whole or not at all, durable with its folder's entry."""
    aside = path.with_name(f"{path.name}.tmp-{attempt}")
    remove_file(aside)
    write_small(aside, data)
    rename(aside, path)
    fsync_dir(path.parent)
