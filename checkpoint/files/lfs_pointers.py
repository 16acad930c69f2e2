"""Git LFS pointers: small texts that a clone without Git LFS has in place of large files."""

from pathlib import Path
from typing import Final

from ...core.errors import ManifestError
from . import storage

_BEGIN: Final = b"version https://git-lfs"


def refuse_pointer(path: Path, head: bytes | bytearray) -> None:
    """Raises ManifestError if a file that begins with `head` is a pointer."""
    if head.startswith(_BEGIN):
        raise ManifestError(
            f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` to download the file."
        )


def refuse_open_pointer(path: Path, fd: int) -> None:
    """Raises ManifestError if an open file is a pointer."""
    head = bytearray(len(_BEGIN))
    storage.pread(fd, memoryview(head), 0)
    refuse_pointer(path, head)
