"""Every touch of a checkpoint's files and folders goes through here, so that tests can inject faults in one place.

What the system refuses is a `StorageError` that names the file; it never counts as damage. A file is missing only if
the folder above does not list it: a network file system may fail to find what is there.
"""

import ctypes
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeVar

from ...core.errors import CheckpointError, ManifestError, ShardCorrupt, ShardMissing, StorageError
from .storage_errors import naming

_Found = TypeVar("_Found")

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_RWF_DONTCACHE: Final = 0x80  # of Linux 6.14's uapi/linux/fs.h
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # Linux
_PAUSES: Final = (0.0, 0.01, 0.1)  # seconds between looks at what may be changing


def _find(path: Path, call: Callable[[], _Found]) -> _Found | None:
    """The call's answer; None if there is no such path, as the folder above confirms."""
    for pause in _PAUSES:
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError):
            if _is_absent(path):
                return None
        time.sleep(pause)  # made or moved in the meantime
    return call()


def _is_absent(path: Path) -> bool:
    """Whether the folder above does not list a path, or is none; or whether it is a link to nothing."""
    above = path.parent
    try:
        if path.name not in os.listdir(above):
            return True
    except FileNotFoundError:
        return above != path and _is_absent(above)
    except NotADirectoryError:
        return not stat.S_ISDIR(os.stat(above).st_mode)
    return os.path.islink(path)


def exists(path: Path) -> bool:
    """Whether there is a file or folder, at a link's end too."""
    return _status(path) is not None


def is_dir(path: Path) -> bool:
    """Whether there is a folder, at a link's end too."""
    found = _status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_link(path: Path) -> bool:
    """Whether there is a link, whatever is at its end."""
    with naming(path, "found"):
        found = _find(path, lambda: os.lstat(path))
    return found is not None and stat.S_ISLNK(found.st_mode)


def _status(path: Path) -> os.stat_result | None:
    with naming(path, "found"):
        return _find(path, lambda: os.stat(path))


def open_read(path: Path) -> int:
    """A descriptor for reading a regular file.

    Raises:
        ShardMissing: there is no such file.
        CheckpointError: it is a folder, a device or a link.
        StorageError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with naming(path, "opened"):
        try:
            fd = _find(path, lambda: os.open(path, flags))
        except OSError:
            if stat.S_ISREG(os.lstat(path).st_mode):
                raise
            raise CheckpointError(f"{path} is not a regular file, as it must be; links are not followed.") from None
    if fd is None:
        raise ShardMissing(f"{path} is missing.")
    with naming(path, "looked at"), _closing_on_error(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is not a regular file, as it must be.")
    return fd


def open_new(path: Path) -> int:
    """A descriptor for writing a file that must not exist yet."""
    with naming(path, "made"):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def open_again(path: Path) -> int:
    """A descriptor for writing more of a file that `open_new` made."""
    with naming(path, "opened"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def close(fd: int) -> None:
    """Closes a descriptor."""
    os.close(fd)


def file_size(fd: int) -> int:
    """Bytes in an open file."""
    with naming(fd, "looked at"):
        return os.fstat(fd).st_size


def free_bytes(folder: Path) -> int:
    """How many bytes more can be written beneath a folder."""
    with naming(folder, "looked at"):
        found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def may_write(folder: Path) -> bool:
    """Whether names can be added to a folder and removed from it."""
    with naming(folder, "looked at"):
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
    with naming(fd, "read"):
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
    with naming(fd, "written"):
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
    with naming(fd, "made durable"):
        os.fsync(fd)


def fsync_dir(path: Path) -> None:
    """Makes a folder's entries durable."""
    with naming(path, "made durable"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Moves a file over `target`, or a folder to where none (or an empty one) is."""
    with naming(source, f"moved to {target}"):
        os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Gives a file a second name."""
    with naming(source, f"linked as {target}"):
        os.link(source, target)


def exchange(one: Path, two: Path) -> None:
    """Swaps two folders at once: at no time is either name free.

    Raises:
        StorageError: EINVAL or ENOSYS where the file system cannot.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two))
    with naming(one, f"exchanged with {two}"):
        if call is None or call(*names, _RENAME_EXCHANGE) != 0:
            number = ctypes.get_errno() if call else errno.ENOSYS
            raise OSError(number, os.strerror(number))


def make_dir(path: Path) -> None:
    """Makes a folder; no error if it is there."""
    with naming(path, "made"):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise


def remove_file(path: Path) -> None:
    """Removes a file, if it is there."""
    with naming(path, "removed"), suppress(FileNotFoundError):
        os.unlink(path)


def remove_dir(path: Path) -> None:
    """Removes an empty folder, if it is there."""
    with naming(path, "removed"), suppress(FileNotFoundError):
        os.rmdir(path)


def make_dirs(path: Path) -> None:
    """Makes a folder and those above it, durably; no error if it is there."""
    missing = list(takewhile(lambda folder: not is_dir(folder), (path, *path.parents)))
    for folder in reversed(missing):
        make_dir(folder)
        fsync_dir(folder.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it, or a file; links are removed, never followed.

    A process that writes there until now may add a file while the others go, or remove one: that is looked at again.
    """
    with naming(path, "removed"):
        found = _find(path, lambda: os.lstat(path))
    if found is None or not stat.S_ISDIR(found.st_mode):
        remove_file(path)
        return
    for pause in (*_PAUSES, 0.5, 1.0, 2.0, None):
        for name in list_names(path):
            remove_tree(path / name)
        try:
            return remove_dir(path)
        except StorageError as error:
            if pause is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
        time.sleep(pause)


def swap(new: Path, old: Path, spare: Path) -> None:
    """Gives a complete folder the name of another, which gets its name instead; durable.

    Where the file system cannot exchange names, a crash can leave the old one under the name `spare`.
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


def list_names(path: Path) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    with naming(path, "listed"):
        return sorted(_find(path, lambda: os.listdir(path)) or ())


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


def read_small(path: Path, max_bytes: int) -> bytes:
    """A whole small file; ManifestError if it is larger than `max_bytes`."""
    with reading(path) as fd:
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
