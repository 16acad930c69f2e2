"""The target of a copy: a new folder, or one that replaces a checkpoint and nothing else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ...core.errors import ConfigError
from ..files import disk_facts, lookup
from ..files.place import check_place, require_room
from ..files.whole_folder import whole_folder
from ..run.run_folder import holding
from .replaceable import require_replaceable


@contextmanager
def target_folder(path: Path, source: Path, force: bool, num_bytes: int = 0) -> Iterator[Path]:
    """Makes a folder to write in, which becomes `path` if the block succeeds; see `whole_folder`.

    Args:
        path: the new folder.
        source: a folder that must not be the target, lie inside it or contain it.
        force: whether to replace a checkpoint at `path`; the old one stays whole until the new one is complete.
        num_bytes: the bytes to be written, for which the disk must have room; 0 = a few.

    Raises:
        ConfigError: see `check_target`; or another job is writing `path`.
        TkError: the disk has no room.
        CheckpointError: `path` has been taken meanwhile; the message says where the new folder is. Or `path` is a step
            of a run in which a job writes.
    """
    check_target(path, source, force)
    require_room(path, num_bytes)
    with holding(path), whole_folder(path, partial(check_target, path, source, force)) as folder:
        yield folder


def check_target(path: Path, source: Path, force: bool) -> tuple[str, ...]:
    """Returns the files of the checkpoint that will be replaced; none if `path` is free or an empty folder.

    Raises:
        ConfigError: `path` cannot become a new folder: it is the source, lies inside it or contains it; it is a link, a
            file, a mount point or the current folder; a folder above it is no folder or cannot be written; or it holds
            files that are no checkpoint, or a checkpoint and `force` is not given.
    """
    check_place(path)
    _check_apart(path, source)
    if not lookup.list_names(path):
        return ()
    files = require_replaceable(path)
    if not force:
        raise ConfigError(f"{path} exists; name another folder, or replace it with --force.")
    for folder in sorted({(path / name).parent for name in files}):
        if not disk_facts.may_write(folder):
            raise ConfigError(
                f"{folder} cannot be written by this user, so it cannot be replaced; name another folder."
            )
    return files


def _check_apart(path: Path, source: Path) -> None:
    ours, theirs = (Path(os.path.realpath(folder)) for folder in (path, source))
    if ours == theirs or ours in theirs.parents:
        raise ConfigError(f"{path} is the source {source} or contains it; name another target folder.")
    if theirs in ours.parents:
        raise ConfigError(f"{path} lies inside the source {source}; name a target folder beside it.")
