"""Finds the checkpoint that a CKPT argument names: a step folder, a run folder, or one of transformers or peft."""

import logging
from pathlib import Path

from ...core.errors import CheckpointError, NotCommitted
from ..files import lookup
from ..format.manifest import COMMIT, MANIFEST, PARTS
from .checkpoint_folder import CheckpointFolder
from .foreign import describe
from .hugging_face import is_hugging_face, is_peft
from .hugging_face_folder import HuggingFaceFolder
from .peft_folder import PeftFolder
from .run_steps import newest_step
from .step_folder import StepFolder

_log = logging.getLogger(__name__)


def locate(path: Path) -> tuple[CheckpointFolder, tuple[str, ...]]:
    """Opens the checkpoint that `path` names; a run folder stands for its newest usable step.

    A step has a lease: the run on this host does not prune it as long as the folder that is returned lives.

    Returns:
        The folder, and the reasons why newer steps of the run were passed over, which are logged too.

    Raises:
        CheckpointError: no checkpoint is usable; the message gives the reason for each step.
    """
    if not lookup.is_dir(path):
        raise CheckpointError(describe(path))
    if _is_step(path):
        return StepFolder.open_leased(path, checked=False), ()
    newest, skipped = newest_step(path, open_step=StepFolder.open_leased)
    reasons = tuple(skipped.values())
    if newest:
        for reason in reasons:
            _log.warning("%s", reason)
        return newest, reasons
    if reasons:
        raise NotCommitted(f"{path} has no usable step. {' '.join(reasons)}")
    found = _open_plain(path)
    if found is None:
        raise CheckpointError(describe(path))
    return found, ()


def open_folder(path: Path) -> CheckpointFolder | None:
    """Opens a folder that is a checkpoint itself; None if it has no mark of one. Raises CheckpointError."""
    if _is_step(path):
        return StepFolder.open(path)
    return _open_plain(path)


def _open_plain(path: Path) -> CheckpointFolder | None:
    """Opens a folder that another program wrote; None if it has no mark of one."""
    if is_hugging_face(path):
        return HuggingFaceFolder.open(path)
    return PeftFolder.open(path) if is_peft(path) else None


def _is_step(path: Path) -> bool:
    """Returns whether a folder has any mark of a tk step; if so, it is never read as a Hugging Face folder."""
    return any(lookup.exists(path / name) for name in (MANIFEST, COMMIT, PARTS))
