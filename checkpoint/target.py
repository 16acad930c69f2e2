"""A folder that appears complete or not at all: written aside, then renamed to its name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import CheckpointError, ConfigError
from . import hf, storage
from .locate import is_step
from .run_folder import new_attempt


@contextmanager
def new_folder(path: Path, source: Path, force: bool) -> Iterator[Path]:
    """The folder to write in. It becomes `path` when the block ends well, and is removed when it does not.

    Args:
        source: a folder that must not be the target or lie inside it.
        force: replace a checkpoint that is at `path` already, once the new one is complete.

    Raises:
        ConfigError: `path` is taken, or is no checkpoint and so is never replaced.
    """
    check_target(path, source, force)
    attempt = new_attempt()
    aside = path.with_name(f"{path.name}.tmp-{attempt}")
    storage.make_dirs(aside)
    try:
        yield aside
    except BaseException:
        storage.remove_tree(aside)
        raise
    if path.exists() and storage.list_names(path):
        if not force:
            raise CheckpointError(f"{path} has appeared meanwhile and is not replaced; the new folder is {aside}.")
        old = path.with_name(f"{path.name}.trash-{attempt}")
        storage.rename(path, old)
        storage.rename(aside, path)
        storage.fsync_dir(path.parent)
        storage.remove_tree(old)
        return
    storage.rename(aside, path)
    storage.fsync_dir(path.parent)


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
