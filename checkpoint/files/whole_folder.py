"""A folder that appears complete or not at all: it is written under a temporary name, then renamed.

No file of a user is lost: only files that the caller names are removed from a replaced folder, and a replaced folder
that received other files meanwhile is kept.
"""

import errno
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError
from . import folders, locks, lookup, storage

_LONGEST: Final = 200  # bytes of a name that leave room for a suffix
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY)

_log = logging.getLogger(__name__)


@contextmanager
def whole_folder(path: Path, replaced: Callable[[], Sequence[str]], shared: bool = False) -> Iterator[Path]:
    """Makes a folder to write in. It becomes `path` if the block succeeds, and is removed if the block raises.

    Folders that dead processes left for the same path are removed first, unless shared; a living process holds its
    folder's lock.

    Args:
        replaced: returns the files at `path` that the new folder replaces, relative to `path`; empty if `path` is free
            or an empty folder. Called once the new folder is complete; raises ConfigError if `path` must stay.
        shared: whether several jobs may make the same folder at once: the first to end wins, and the folders of the
            others are removed. Otherwise a second job is refused, and a complete folder whose name was taken is kept
            under another name.

    Raises:
        ConfigError: another job is writing `path`; or, if shared, another job has made it.
        CheckpointError: `path` has been taken meanwhile; the message says where the new folder is.
    """
    suffix = os.urandom(4).hex()
    temporary = _sibling(path, "tk-target", suffix)
    with ExitStack() as lock:
        try:  # a signal may raise at any line, the one that makes the folder included
            _make_locked(temporary, path, shared, lock)
            yield temporary
        except BaseException:
            folders.remove_tree(temporary)
            raise
        _put_in_place(temporary, path, replaced, suffix, shared)


def _make_locked(temporary: Path, path: Path, shared: bool, lock: ExitStack) -> None:
    """Makes the folder to write in, and holds its lock, if it has one, until `lock` is closed."""
    folders.make_dirs(path.parent)
    if shared:  # without locks: the parent may itself be a whole folder of this process, which holds its lock
        folders.make_dir(temporary)
        return
    with locks.locked_folder(path.parent):  # no other job removes the new folder before it is locked
        _remove_leftovers(path)
        folders.make_dir(temporary)
        held = locks.lock_folder(temporary)
    if held is not None:
        lock.callback(storage.close, held)


def _remove_leftovers(path: Path) -> None:
    """Removes the folders that dead processes left for the same target."""
    leftover = re.compile(re.escape(_stem(path)) + r"\.tk-target-[0-9a-f]{8}")
    for name in lookup.list_names(path.parent):
        if not leftover.fullmatch(name):
            continue
        lock = locks.lock_folder(path.parent / name)
        if lock is None:
            raise ConfigError(
                f"Another job is writing {path}, in {path.parent / name}. Wait for its end or name another folder. If "
                "that job has ended (this file system may have no locks), remove its folder."
            )
        folders.remove_tree(path.parent / name)
        storage.close(lock)


def _put_in_place(
    temporary: Path, path: Path, replaced: Callable[[], Sequence[str]], suffix: str, shared: bool
) -> None:
    try:
        old = replaced()
        if not old:
            folders.rename(temporary, path)
    except (ConfigError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _TAKEN:
            raise
        if shared:
            folders.remove_tree(temporary)
            raise ConfigError(f"{path} was taken while the new folder was written. {error}") from error
        kept = _sibling(path, "new", suffix)
        folders.rename(temporary, kept)
        raise CheckpointError(
            f"{path} was taken while the new folder was written. The new folder is complete: {kept}. {error}"
        ) from error
    if not old:
        folders.fsync_dir(path.parent)
        return
    kept = _sibling(path, "old", suffix)
    folders.swap(temporary, path, kept)  # the old folder now has the temporary name
    if not _remove(temporary, old):
        folders.rename(temporary, kept)
        _log.warning("%s received new files while it was replaced; they are in %s.", path, kept)


def _remove(folder: Path, files: Sequence[str]) -> bool:
    """Removes those files and the folder; False, and the folder stays, if it holds other files."""
    for name in files:
        folders.remove_file(folder / name)
    inner = {(folder / name).parent for name in files}
    for each in sorted(inner | {folder}, reverse=True):
        if lookup.list_names(each):
            return False
        folders.remove_dir(each)
    return True


def _sibling(path: Path, word: str, suffix: str) -> Path:
    """Returns `NAME.WORD-SUFFIX` in the target's parent; a long name is replaced by its hash."""
    return path.with_name(f"{_stem(path)}.{word}-{suffix}")


def _stem(path: Path) -> str:
    name = os.fsencode(path.name)
    return path.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()
