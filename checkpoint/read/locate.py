"""Finding the checkpoint that a CKPT argument means: a step folder, a run folder, or a Hugging Face folder."""

import logging
from pathlib import Path

from ...core.errors import CheckpointError, NotCommitted
from ..files import lookup
from ..format.manifest import COMMIT, MANIFEST, PARTS
from ..run.run_folder import RunFolder
from . import hugging_face as hf
from .foreign import describe
from .reader import Checkpoint

_log = logging.getLogger(__name__)


def open_any(path: Path) -> Checkpoint:
    """Opens what `path` means; see `Checkpoint.open`. Why newer steps of a run are passed over is logged."""
    if not lookup.is_dir(path):
        raise CheckpointError(describe(path))
    if is_step(path):
        return Checkpoint.open_step(path, lazy=True)
    newest = RunFolder(path).newest()
    if newest.checkpoint:
        for reason in newest.skipped.values():
            _log.warning("%s", reason)
        return newest.checkpoint
    if newest.skipped:
        raise NotCommitted(f"{path} has no usable step. {' '.join(newest.skipped.values())}")
    if hf.is_hugging_face(path):
        return Checkpoint.open_hugging_face(path)
    raise CheckpointError(describe(path))


def is_step(path: Path) -> bool:
    """Whether a folder bears any mark of a tk step; such a folder is never read as a Hugging Face one."""
    return any(lookup.exists(path / name) for name in (MANIFEST, COMMIT, PARTS))
