"""Checks of files against their recorded sizes and digests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import CheckpointError, DamagedCheckpoint, ShardCorrupt
from ..files import small_files, storage
from ..files.lfs_pointers import refuse_open_pointer
from ..files.links import real_path
from ..format.chunk import Part
from ..format.manifest import FileDigest


def read_part(folder: Path, name: str, known: FileDigest, max_bytes: int) -> bytes:
    """Reads a part and checks its recorded size and SHA-256; ShardCorrupt if it has changed."""
    path = real_path(folder, name)
    data = small_files.read_small(path, max_bytes)
    if FileDigest.of(data) != known:
        raise ShardCorrupt(
            f"{path} is not the file that was saved: its size or SHA-256 differs from the manifest's. Restore it from "
            "a backup, or use another step."
        )
    return data


def read_side_file(folder: Path, name: str, known: FileDigest, max_bytes: int) -> bytes:
    """Reads a side file and checks its recorded size and SHA-256; raises `edited_file` if it has changed."""
    with _no_damage():
        data = small_files.read_small(real_path(folder, name), max_bytes)
    if FileDigest.of(data) != known:
        raise edited_file(folder / name)
    return data


def check_side_size(folder: Path, name: str, known: FileDigest) -> None:
    """Raises `edited_file` unless a side file has its recorded size."""
    path = real_path(folder, name)
    with _no_damage(), storage.reading(path) as fd:
        size = storage.file_size(fd)
        if size != known.size:
            refuse_open_pointer(path, fd)
            raise edited_file(folder / name)


@contextmanager
def _no_damage() -> Iterator[None]:
    """Raises a missing side file as an error that is no damage; see `edited_file`."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{error} The checkpoint was sealed with it: restore it from a backup.") from error


def edited_file(path: Path) -> CheckpointError:
    """Makes the error for a side file that has changed.

    It is no damage, nor is a missing side file: a person or a program may have edited it, and then an older step is not
    what they want.
    """
    return CheckpointError(
        f"{path} is not the file that was saved: its size or SHA-256 differs from the manifest's, so it was changed "
        "after the checkpoint was sealed. Restore it from a backup. To change such a file, write a folder without a "
        "seal (tk export --plain), and edit it there."
    )


def check_sizes(folder: Path, parts: Mapping[str, Part]) -> None:
    """Raises ShardMissing or ShardCorrupt unless every data file exists with its recorded size."""
    for part in parts.values():
        for name, known in part.files.items():
            path = real_path(folder, name)
            with storage.reading(path) as fd:
                size = storage.file_size(fd)
                if size != known.size:
                    refuse_open_pointer(path, fd)
                    raise ShardCorrupt(
                        f"{folder / name} has {size} bytes; {known.size} were written. Restore the file, or use "
                        "another step."
                    )
