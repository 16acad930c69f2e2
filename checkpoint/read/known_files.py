"""Checks of files against their recorded sizes and digests."""

from collections.abc import Mapping
from pathlib import Path

from ...core.errors import ShardCorrupt
from ..files import small_files, storage
from ..files.links import real_path
from ..format.chunk import Part
from ..format.manifest import FileDigest


def read_known(folder: Path, name: str, known: FileDigest, max_bytes: int) -> bytes:
    """Reads a small file and checks its recorded size and SHA-256; ShardCorrupt if it has changed."""
    path = real_path(folder, name)
    data = small_files.read_small(path, max_bytes)
    if FileDigest.of(data) != known:
        raise changed_file(path)
    return data


def changed_file(path: Path) -> ShardCorrupt:
    """Makes the error for a small file that has changed."""
    return ShardCorrupt(
        f"{path} is not the file that was saved: its size or SHA-256 differs from the manifest's. Restore it from "
        "a backup, or use another step."
    )


def check_sizes(folder: Path, parts: Mapping[str, Part]) -> None:
    """Raises ShardMissing or ShardCorrupt unless every data file exists with its recorded size."""
    for part in parts.values():
        for name, known in part.files.items():
            with storage.reading(real_path(folder, name)) as fd:
                size = storage.file_size(fd)
            if size != known.size:
                raise ShardCorrupt(
                    f"{folder / name} has {size} bytes; {known.size} were written. Restore the file, or use another "
                    "step."
                )
