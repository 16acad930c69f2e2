"""Finding the checkpoint that a CKPT argument means: a step folder, a run folder, or a Hugging Face folder."""

from pathlib import Path

from ..core.errors import CheckpointError, NotCommitted
from . import hf, storage
from .foreign import describe
from .manifest import COMMIT, MANIFEST, PARTS
from .reader import Checkpoint
from .run_folder import RunFolder


def open_any(path: Path) -> Checkpoint:
    """Opens what `path` means; see `Checkpoint.open`."""
    if not storage.is_dir(path):
        raise CheckpointError(describe(path))
    if is_step(path):
        return Checkpoint.open_step(path, lazy=True)
    run = RunFolder(path)
    if run.steps():
        found = run.newest()
        if found.checkpoint is None:
            raise NotCommitted(f"{path} has no usable step. {' '.join(found.skipped.values())}")
        return found.checkpoint
    if hf.is_hugging_face(path):
        return Checkpoint.open_hugging_face(path)
    raise CheckpointError(describe(path))


def is_step(path: Path) -> bool:
    """Whether a folder bears any mark of a tk step; such a folder is never read as a Hugging Face one."""
    return any(storage.exists(path / name) for name in (MANIFEST, COMMIT, PARTS))
