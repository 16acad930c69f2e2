"""Small files that are read and written whole."""

from pathlib import Path

from ...core.errors import ManifestError
from . import folders, storage
from .lfs_pointers import refuse_pointer


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
