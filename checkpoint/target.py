"""A folder that appears complete or not at all: written aside, then renamed to its name."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import CheckpointError, ConfigError, TkError
from ..core.progress import format_bytes
from . import hf, storage
from .locate import is_step
from .run_folder import new_attempt


@contextmanager
def new_folder(path: Path, source: Path, force: bool, num_bytes: int = 0) -> Iterator[Path]:
    """The folder to write in. It becomes `path` when the block ends well, and is removed when it does not.

    What dead attempts at the same target left is removed first: a folder is locked as long as its maker lives.

    Args:
        source: a folder that must not be the target or lie inside it.
        force: replace a checkpoint that is at `path` already, once the new one is complete; it is whole until then.
        num_bytes: what will be written, for which there must be room; 0 = next to nothing.

    Raises:
        ConfigError: `path` is taken, or is no checkpoint and so is never replaced.
        TkError: there is no room for it.
    """
    check_target(path, source, force)
    with _locked_aside(path) as aside:
        try:
            _require_room(path, aside, num_bytes)
            yield aside
        except BaseException:
            storage.remove_tree(aside)
            raise
        _put_in_place(aside, path, force)


@contextmanager
def _locked_aside(path: Path) -> Iterator[Path]:
    storage.make_dirs(path.parent)
    aside = path.with_name(f"{path.name}.tmp-{new_attempt()}")
    with storage.locked_folder(path.parent):  # nobody reaps between our making a folder and locking it
        _reap(path)
        storage.make_dir(aside)
        lock = storage.lock_folder(aside)
    try:
        yield aside
    finally:
        if lock is not None:
            storage.close(lock)


def _require_room(path: Path, aside: Path, num_bytes: int) -> None:
    free = storage.free_bytes(aside)
    if num_bytes > free:
        raise TkError(
            f"{path} would take {format_bytes(num_bytes)}; {format_bytes(free)} are free there. Free some, or name a "
            "folder on another disk; nothing was written."
        )


def _reap(path: Path) -> None:
    leftover = re.compile(re.escape(path.name) + r"\.tmp-[0-9a-f]{8}")
    for name in storage.list_names(path.parent):
        if leftover.fullmatch(name) and (lock := storage.lock_folder(path.parent / name)) is not None:
            storage.remove_tree(path.parent / name)
            storage.close(lock)


def _put_in_place(aside: Path, path: Path, force: bool) -> None:
    if not (path.exists() and storage.list_names(path)):
        storage.rename(aside, path)
        storage.fsync_dir(path.parent)
        return
    if not force:
        raise CheckpointError(f"{path} has appeared meanwhile and is not replaced; the new folder is {aside}.")
    storage.swap(aside, path)
    storage.remove_tree(aside)


def check_target(path: Path, source: Path, force: bool) -> None:
    """Raises ConfigError where `new_folder` would refuse."""
    if path.resolve() in (source.resolve(), *source.resolve().parents):
        raise ConfigError(f"{path} is the source {source} or contains it; name another target folder.")
    if not path.exists() or (path.is_dir() and not storage.list_names(path)):
        return
    if not path.is_dir() or not (is_step(path) or hf.is_hugging_face(path)):
        raise ConfigError(f"{path} is there already and is no checkpoint, so it is not replaced; name another folder.")
    if not force:
        raise ConfigError(f"{path} is there already; name another folder, or replace it with --force.")
