"""A folder that appears complete or not at all: written aside, then renamed to its name. Nothing of a user's is lost.

Only files that the caller names are ever removed from a folder that is replaced; one that got others meanwhile is kept.
"""

import errno
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError
from . import folders, locks, lookup, storage

_LONGEST: Final = 200  # bytes of a name to which an ending may be added
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY)

_log = logging.getLogger(__name__)


@contextmanager
def whole_folder(path: Path, replaced: Callable[[], Sequence[str]], shared: bool = False) -> Iterator[Path]:
    """The folder to write in. It becomes `path` when the block ends well, and is removed when it does not.

    What dead attempts at the same path left is removed first: a folder is locked as long as its maker lives.

    Args:
        replaced: the files at `path` that the new folder replaces, relative to it; none where it is free or an empty
            folder. Called once the new folder is complete; raises ConfigError where `path` cannot be replaced.
        shared: several jobs may make the same folder at once: the first to end wins, and the folders of the others are
            removed. Else a second job is refused, and a complete folder whose name was taken is kept under another.

    Raises:
        ConfigError: another job is writing `path`; or, if shared, it has been taken meanwhile.
        CheckpointError: `path` has been taken meanwhile; the message says where the new folder is.
    """
    attempt = secrets.token_hex(4)
    with _locked_aside(path, attempt, shared) as aside:
        try:
            yield aside
        except BaseException:
            folders.remove_tree(aside)
            raise
        _put_in_place(aside, path, replaced, attempt, shared)


@contextmanager
def _locked_aside(path: Path, attempt: str, shared: bool) -> Iterator[Path]:
    folders.make_dirs(path.parent)
    aside = _beside(path, "tk-target", attempt)
    with locks.locked_folder(path.parent):  # no other job reaps between our making a folder and locking it
        _reap(path, shared)
        folders.make_dir(aside)
        lock = locks.lock_folder(aside)
    try:
        yield aside
    finally:
        if lock is not None:
            storage.close(lock)


def _reap(path: Path, shared: bool) -> None:
    """Removes what dead attempts at the same target left."""
    leftover = re.compile(re.escape(_stem(path)) + r"\.tk-target-[0-9a-f]{8}")
    for name in lookup.list_names(path.parent):
        if not leftover.fullmatch(name):
            continue
        lock = locks.lock_folder(path.parent / name)
        if lock is None and shared:
            continue
        if lock is None:
            raise ConfigError(
                f"Another job is writing {path}, in {path.parent / name}. Wait for its end or name another folder; if "
                "there is no such job any more (this file system may have no locks), remove that folder."
            )
        folders.remove_tree(path.parent / name)
        storage.close(lock)


def _put_in_place(aside: Path, path: Path, replaced: Callable[[], Sequence[str]], attempt: str, shared: bool) -> None:
    try:
        old = replaced()
        if not old:
            folders.rename(aside, path)
    except (ConfigError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _TAKEN:
            raise
        if shared:
            folders.remove_tree(aside)
            raise ConfigError(f"{path} was free and is not any more. {error}") from error
        kept = _beside(path, "new", attempt)
        folders.rename(aside, kept)
        raise CheckpointError(
            f"{path} was free and is not any more. The new folder is complete: {kept}. {error}"
        ) from error
    if not old:
        folders.fsync_dir(path.parent)
        return
    kept = _beside(path, "old", attempt)
    folders.swap(aside, path, kept)
    if not _remove(aside, old):
        folders.rename(aside, kept)
        _log.warning("%s got new files while it was replaced; they are in %s.", path, kept)


def _remove(folder: Path, files: Sequence[str]) -> bool:
    """Removes those files and the folder; False, and the folder stays, if something else is there by now."""
    for name in files:
        folders.remove_file(folder / name)
    inner = {(folder / name).parent for name in files}
    for each in sorted(inner | {folder}, reverse=True):
        if lookup.list_names(each):
            return False
        folders.remove_dir(each)
    return True


def _beside(path: Path, word: str, attempt: str) -> Path:
    """`NAME.WORD-ATTEMPT` beside a target; a long name is replaced by its hash."""
    return path.with_name(f"{_stem(path)}.{word}-{attempt}")


def _stem(path: Path) -> str:
    name = os.fsencode(path.name)
    return path.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()
