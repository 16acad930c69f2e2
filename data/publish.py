"""Folders that appear whole or not at all: written aside, synced, renamed."""

import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.convert.target import check_place
from ..core.errors import ConfigError


def refuse_existing(path: Path, replaceable: Collection[str] = ()) -> None:
    """Raises ConfigError unless `path` is free, an empty folder, or one that holds nothing but `replaceable` names.

    Also where no folder can get that name, see `check_place`.
    """
    check_place(path)
    if not path.exists():
        return
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(names - set(replaceable))
    if foreign and replaceable:
        raise ConfigError(f"{path} holds {foreign[0]!r}, which was not written by this command: it is left as it is.")
    if foreign:
        raise ConfigError(f"{path} exists already; name another folder, or pass --force to replace it.")


@contextmanager
def new_folder(path: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when the block ends well and is gone when it does not.

    Args:
        path: where it will be.
        replaceable: names that an existing folder may hold to be replaced; none = only an empty one is.

    Raises:
        ConfigError: `path` is taken or cannot be made.
    """
    refuse_existing(path, replaceable)
    suffix = secrets.token_hex(4)
    aside, old = (path.with_name(f".{path.name}.{word}-{suffix}") for word in ("tmp", "old"))
    try:
        _make(aside, path)
        yield aside
        for entry in (*aside.rglob("*"), aside):
            _sync(entry)
        refuse_existing(path, replaceable)
        if path.exists():
            path.rename(old)
        aside.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make(aside: Path, path: Path) -> None:
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"Cannot make {path}: {error.strerror}.") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
