"""A folder that appears complete or not at all: written aside, then renamed to its name. Nothing of a user's is lost.

What cannot be is refused before anything is written, and looked at again before the new folder gets its name. Only a
folder that is a checkpoint and nothing else is ever replaced, and of it only the files that make it one are removed.
"""

import errno
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError, TkError
from ...core.progress import format_bytes
from ..files import disk_facts, folders, locks, lookup, storage
from ..format.step_names import new_attempt
from ..run.run_folder import holding
from .replaceable import remove_replaced, require_replaceable

_LONGEST: Final = 200  # bytes of a name to which an ending may be added
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY)

_log = logging.getLogger(__name__)


@contextmanager
def new_folder(path: Path, source: Path, force: bool, num_bytes: int = 0) -> Iterator[Path]:
    """The folder to write in. It becomes `path` when the block ends well, and is removed when it does not.

    What dead attempts at the same target left is removed first: a folder is locked as long as its maker lives.

    Args:
        source: a folder that must not be the target, lie inside it or around it.
        force: replace a checkpoint that is at `path` already, once the new one is complete; it is whole until then.
        num_bytes: what will be written, for which there must be room; 0 = next to nothing.

    Raises:
        ConfigError: see `check_target`; or another job is writing `path`.
        TkError: there is no room for it.
        CheckpointError: `path` has been taken meanwhile; the message says where the new folder is. Or it is a step of a
            run in which a job writes.
    """
    check_target(path, source, force)
    _require_room(path, num_bytes)
    attempt = new_attempt()
    with holding(path), _locked_aside(path, attempt) as aside:
        try:
            yield aside
        except BaseException:
            folders.remove_tree(aside)
            raise
        _put_in_place(aside, path, source, force, attempt)


def check_target(path: Path, source: Path, force: bool) -> tuple[str, ...]:
    """The files of the checkpoint that will be replaced; none where `path` is free or an empty folder.

    Raises:
        ConfigError: `path` cannot become a new folder: it is the source, lies inside it or around it; is a link, a
            file, a mount point or the current folder; is or is below what is no folder or cannot be written; or it
            holds anything but a checkpoint, or a checkpoint and `force` is not given.
    """
    check_place(path)
    _check_apart(path, source)
    if not lookup.list_names(path):
        return ()
    files = require_replaceable(path)
    if not force:
        raise ConfigError(f"{path} is there already; name another folder, or replace it with --force.")
    for folder in sorted({(path / name).parent for name in files}):
        if not disk_facts.may_write(folder):
            raise ConfigError(
                f"{folder} cannot be written by this user, so it cannot be replaced; name another folder."
            )
    return files


def check_place(path: Path) -> None:
    """Raises ConfigError where a new folder cannot get its name, for what is there or above; not if it is a folder."""
    if path.name in ("", ".."):
        raise ConfigError(f"{path} cannot be replaced by a new folder; give the new folder's own name.")
    above = _nearest(path)
    if not above.is_dir():
        kind = "a link that leads nowhere" if above.is_symlink() else "a file"
        raise ConfigError(f"{above} is {kind}, so {path} cannot be made; name another folder.")
    if not disk_facts.may_write(above):
        raise ConfigError(f"{above} cannot be written by this user, so {path} cannot be made; name another folder.")
    if os.path.lexists(path):
        _check_kind(path)


def _check_apart(path: Path, source: Path) -> None:
    ours, theirs = (Path(os.path.realpath(folder)) for folder in (path, source))
    if ours == theirs or ours in theirs.parents:
        raise ConfigError(f"{path} is the source {source} or contains it; name another target folder.")
    if theirs in ours.parents:
        raise ConfigError(f"{path} lies inside the source {source}; name a target folder beside it.")


def _check_kind(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link (to {os.readlink(path)}), which a new folder cannot replace; name the folder itself."
        )
    if not path.is_dir():
        raise ConfigError(f"{path} is there already and is a file, so it is not replaced; name another folder.")
    mounts = disk_facts.mounts_beneath(path)
    if mounts:
        raise ConfigError(
            f"{mounts[0]} is a mount point, which a new folder cannot replace; name a folder inside it."
            if mounts[0] == Path(os.path.realpath(path))
            else f"{path} holds the mount point {mounts[0]}, so it is not replaced; name another folder."
        )
    if path.samefile(os.curdir):
        raise ConfigError(f"{path} is the current folder, which a new folder would replace; name one inside it.")


def _nearest(path: Path) -> Path:
    """The nearest of the folders above that is there, be it a folder or not."""
    return next(folder for folder in path.absolute().parents if os.path.lexists(folder))


def _require_room(path: Path, num_bytes: int) -> None:
    free = disk_facts.free_bytes(_nearest(path))
    if num_bytes > free:
        raise TkError(
            f"{path} would take {format_bytes(num_bytes)}; {format_bytes(free)} are free there. Free some, or name a "
            "folder on another disk; nothing was written."
        )


def beside(path: Path, word: str, attempt: str) -> Path:
    """`NAME.WORD-ATTEMPT` beside a target; a long name is told by its hash."""
    return path.with_name(f"{_stem(path)}.{word}-{attempt}")


def _stem(path: Path) -> str:
    name = os.fsencode(path.name)
    return path.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()


@contextmanager
def _locked_aside(path: Path, attempt: str) -> Iterator[Path]:
    folders.make_dirs(path.parent)
    aside = beside(path, "tk-target", attempt)
    with locks.locked_folder(path.parent):  # nobody reaps between our making a folder and locking it
        _reap(path)
        folders.make_dir(aside)
        lock = locks.lock_folder(aside)
    try:
        yield aside
    finally:
        if lock is not None:
            storage.close(lock)


def _reap(path: Path) -> None:
    """Removes what dead attempts at the same target left."""
    leftover = re.compile(re.escape(_stem(path)) + r"\.tk-target-[0-9a-f]{8}")
    for name in lookup.list_names(path.parent):
        if not leftover.fullmatch(name):
            continue
        lock = locks.lock_folder(path.parent / name)
        if lock is None:
            raise ConfigError(
                f"Another job is writing {path}, in {path.parent / name}. Wait for its end or name another folder; if "
                "there is no such job any more (this file system may have no locks), remove that folder."
            )
        folders.remove_tree(path.parent / name)
        storage.close(lock)


def _put_in_place(aside: Path, path: Path, source: Path, force: bool, attempt: str) -> None:
    try:
        replaced = check_target(path, source, force)
        if not replaced:
            folders.rename(aside, path)
    except (ConfigError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _TAKEN:
            raise
        kept = beside(path, "new", attempt)
        folders.rename(aside, kept)
        raise CheckpointError(
            f"{path} was free and is not any more. The new folder is complete: {kept}. {error}"
        ) from error
    if not replaced:
        folders.fsync_dir(path.parent)
        return
    kept = beside(path, "old", attempt)
    folders.swap(aside, path, kept)
    if not remove_replaced(aside, replaced):
        folders.rename(aside, kept)
        _log.warning("%s got new files while it was replaced; they are in %s.", path, kept)
