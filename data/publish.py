"""The publication of token folders and tokenizers, which appear whole or not at all."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..checkpoint.files import folders, lookup, storage
from ..checkpoint.files.place import check_place
from ..checkpoint.files.whole_folder import whole_folder
from ..core.errors import ConfigError


def refuse_existing(path: Path, replaceable: Collection[str] = ()) -> tuple[str, ...]:
    """Checks that a new folder may take the place of `path`.

    Args:
        path: the folder to make; it may not exist, be empty, or hold only files of `replaceable` names.
        replaceable: the names of files that an existing folder may hold and still be replaced.

    Returns:
        The names of the files that a new folder replaces.

    Raises:
        ConfigError: `path` is taken, or no folder can be made there (see `check_place`).
    """
    check_place(path)
    names = lookup.list_names(path)
    foreign = [name for name in names if name not in replaceable or lookup.is_dir(path / name)]
    if foreign and replaceable:
        raise ConfigError(
            f"{path} was not replaced: it holds {foreign[0]!r}, which this command did not write. Name another folder, "
            "or move that file away."
        )
    if foreign:
        raise ConfigError(f"{path} exists already: name another folder, or pass --force to replace it.")
    return tuple(names)


@contextmanager
def new_folder(path: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """Yields a folder to write into, which becomes `path` at the end of the block, or is removed if the block fails.

    Args:
        path: the folder to make.
        replaceable: the names of files that an existing folder may hold and still be replaced; () replaces only an
            empty folder.

    Raises:
        ConfigError: `path` is taken or cannot be made.
    """
    refuse_existing(path, replaceable)
    with whole_folder(path, partial(refuse_existing, path, replaceable), shared=True) as folder:
        yield folder
        _sync(folder)


def _sync(folder: Path) -> None:
    """Makes all files and folders in a folder durable."""
    for name in lookup.list_names(folder):
        if lookup.is_dir(folder / name):
            _sync(folder / name)
            continue
        with storage.reading(folder / name) as fd:
            storage.fsync(fd)
    folders.fsync_dir(folder)
