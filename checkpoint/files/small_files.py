"""Small files, read and written whole."""

from pathlib import Path

from ...core.errors import ManifestError
from . import folders, storage


def read_small(path: Path, max_bytes: int) -> bytes:
    """A whole small file; ManifestError if it is larger than `max_bytes`."""
    with storage.reading(path) as fd:
        size = storage.file_size(fd)
        if size > max_bytes:
            raise ManifestError(f"{path} has {size} bytes; at most {max_bytes} are accepted.")
        data = bytearray(size)
        storage.read_exact(fd, memoryview(data), 0, path)
        return bytes(data)


def write_small(path: Path, data: bytes) -> None:
    """A new small file, durable; its folder's entry is not."""
    fd = storage.open_new(path)
    try:
        storage.pwrite(fd, memoryview(data), 0)
        storage.fsync(fd)
    finally:
        storage.close(fd)


def replace_small(path: Path, data: bytes, attempt: str) -> None:
    """A small file that appears whole or not at all, durable with its folder's entry."""
    aside = path.with_name(f"{path.name}.tmp-{attempt}")
    folders.remove_file(aside)
    write_small(aside, data)
    folders.rename(aside, path)
    folders.fsync_dir(path.parent)
