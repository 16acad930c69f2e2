"""Symbolic links in place of a checkpoint's files, as the Hugging Face hub's cache, DVC and `ln -s` make them."""

import os
from pathlib import Path

from ...core.errors import CheckpointError
from . import lookup


def real_path(folder: Path, name: str) -> Path:
    """Returns the file behind a name in a folder: the file itself, or the target of a link, wherever it lies.

    Raises:
        CheckpointError: the link leads nowhere. That is no damage: the disk or the cache with its target may be absent.
    """
    path = folder / name
    if not lookup.is_link(path):
        return path
    target = Path(os.path.realpath(path))
    if not lookup.exists(target):
        raise CheckpointError(
            f"{path} is a link to {path.readlink()}, which does not exist. Mount or download the link's target, or put "
            "the file itself there."
        )
    return target
