"""The removal of a step: no reader ever takes a half-removed one for a step, and no failure ends a job.

A step is renamed, then removed. Some file systems cannot rename a folder (overlayfs answers EXDEV for one of a lower
layer): there its COMMIT is renamed, which makes it no step, and then everything else is removed in place.
"""

import errno
import logging
from pathlib import Path

from ...core.errors import CheckpointError
from ..files import folders, locks, lookup
from ..format.manifest import COMMIT
from ..format.step_names import attempt_of, step_of
from ..read.step_folder import StepFolder

_log = logging.getLogger(__name__)


def trash_name(name: str, attempt: str) -> str:
    """Returns the name under which an attempt removes a folder or a file."""
    return f"{name}.trash-{attempt}"


def good_step(path: Path) -> StepFolder | None:
    """Opens a step; None if it is damaged, or cannot be read now, which is logged."""
    try:
        return StepFolder.open_checked(path)
    except CheckpointError:
        return None
    except OSError as error:
        _log.warning("%s is not counted when steps are pruned: %s", path, error)
        return None


def remove_step(path: Path, attempt: str) -> bool:
    """Removes a step; False if a process reads it, or if that fails, which is logged.

    Then the step is whole, or no step any more.
    """
    try:
        with locks.unread_folder(path) as unread:
            if unread:
                _remove(path, attempt)
            else:
                _log.info("%s is not pruned yet: a process reads it.", path)
    except OSError as error:
        _log.warning("%s is not pruned, or not wholly: %s It is tried again after the next save.", path, error)
        return False
    return unread


def _remove(path: Path, attempt: str) -> None:
    trash = path.with_name(trash_name(path.name, attempt))
    if _renamed(path, trash):
        folders.fsync_dir(path.parent)  # otherwise a power cut could restore the name of a half-removed step
        folders.remove_tree(trash)
    else:
        folders.rename(path / COMMIT, path / trash_name(COMMIT, attempt))
        folders.fsync_dir(path)
        _remove_rest(path)


def remove_leftover(path: Path) -> None:
    """Removes a temporary folder or file, or the rest of a step; a failure is logged."""
    try:
        if step_of(path.name) is None:
            folders.remove_tree(path)
        else:
            _remove_rest(path)
    except OSError as error:
        _log.warning("%s, which an earlier save or start has left, is not removed: %s", path, error)


def is_half_removed(path: Path) -> bool:
    """Returns whether a folder with a step's name is one whose removal in place was interrupted; False if unknown."""
    try:
        if step_of(path.name) is None or lookup.exists(path / COMMIT) or not lookup.is_dir(path):
            return False
        return bool(_marks(path)) or not lookup.list_names(path)  # empty: only its own removal was missing
    except OSError:
        return False


def _renamed(path: Path, trash: Path) -> bool:
    try:
        folders.rename(path, trash)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _marks(path: Path) -> list[str]:
    """Returns the names that COMMIT has in a step whose removal has begun."""
    return [name for name in lookup.list_names(path) if attempt_of(name, [COMMIT]) and name.startswith(f"{COMMIT}.")]


def _remove_rest(path: Path) -> None:
    """Removes a step that lacks its COMMIT; the mark is the last to go, so that the next start finds it."""
    marks = _marks(path)
    for name in lookup.list_names(path):
        if name not in marks:
            folders.remove_tree(path / name)
    folders.fsync_dir(path)
    folders.remove_tree(path)
