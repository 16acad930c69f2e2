"""Small files that are read and written whole."""

from pathlib import Path
from typing import Final

from ...core.errors import ManifestError
from . import folders, storage

_LFS_POINTER: Final = b"version https://git-lfs"


def read_small(path: Path, max_bytes: int) -> bytes:
    """Reads a whole small file; ManifestError if it is larger than `max_bytes`, or a Git LFS pointer."""
    with storage.reading(path) as fd:
        size = storage.file_size(fd)
        if size > max_bytes:
            raise ManifestError(f"{path} has {size} bytes; at most {max_bytes} are accepted.")
        data = bytearray(size)
        storage.read_exact(fd, memoryview(data), 0, path)
    refuse_pointer(path, data)
    return bytes(data)


def refuse_pointer(path: Path, head: bytes | bytearray) -> None:
    """Raises ManifestError if a file that begins with `head` is a Git LFS pointer, which stands for the real file."""
    if head.startswith(_LFS_POINTER):
        raise ManifestError(
            f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` to download the file."
        )


def refuse_open_pointer(path: Path, fd: int) -> None:
    """Raises ManifestError if an open file is a Git LFS pointer."""
    head = bytearray(len(_LFS_POINTER))
    storage.pread(fd, memoryview(head), 0)
    refuse_pointer(path, head)


def write_small(path: Path, data: bytes) -> None:
    """Writes a new small file. Its bytes are durable, its name is not before an fsync of the folder."""
    fd = storage.open_new(path)
    try:
        storage.pwrite(fd, memoryview(data), 0)
        storage.fsync(fd)
    finally:
        storage.close(fd)


def place_small(path: Path, data: bytes, suffix: str) -> None:
    """Writes a small file that appears whole or not at all, under `NAME.tmp-SUFFIX` until it is.

    Its bytes are durable, its name is not before an fsync of the folder.
    """
    temporary = path.with_name(f"{path.name}.tmp-{suffix}")
    folders.remove_file(temporary)
    write_small(temporary, data)
    folders.rename(temporary, path)


def replace_small(path: Path, data: bytes, suffix: str) -> None:
    """Writes a small file that appears whole or not at all, durably; see `place_small`."""
    place_small(path, data, suffix)
    folders.fsync_dir(path.parent)
