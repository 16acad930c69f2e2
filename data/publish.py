"""Token folders and tokenizers appear whole or not at all."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..checkpoint.files import folders, lookup, storage
from ..checkpoint.files.place import check_place
from ..checkpoint.files.whole_folder import whole_folder
from ..core.errors import ConfigError


def refuse_existing(path: Path, replaceable: Collection[str] = ()) -> tuple[str, ...]:
    """Raises ConfigError unless `path` is free, an empty folder, or one that holds only files of `replaceable` names.

    Also where no folder can get that name, see `check_place`.

    Returns:
        The files that a new folder replaces.
    """
    check_place(path)
    names = lookup.list_names(path)
    foreign = [name for name in names if name not in replaceable or lookup.is_dir(path / name)]
    if foreign and replaceable:
        raise ConfigError(f"{path} holds {foreign[0]!r}, which was not written by this command: it is left as it is.")
    if foreign:
        raise ConfigError(f"{path} exists already; name another folder, or pass --force to replace it.")
    return tuple(names)


@contextmanager
def new_folder(path: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when the block ends well and is gone when it does not.

    Args:
        path: its name at the end.
        replaceable: names of files that an existing folder may hold to be replaced; none = only an empty one is.

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
