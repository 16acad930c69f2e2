"""Symbolic links that stand for a checkpoint's files: those of the Hugging Face hub's cache, whose snapshots are links.

The cache is CACHE/models--OWNER--NAME/{blobs, snapshots/REVISION}: a name in REVISION is a link to a file in blobs,
which may itself be a link to a file in CACHE/blobs/XX that all repositories share.
"""

import os
from pathlib import Path

from ...core.errors import CheckpointError
from . import lookup


def real_path(folder: Path, name: str, inside: bool = False) -> Path:
    """Returns the regular file behind a name in a folder: the file itself, or the target of a link of the hub's cache.

    Args:
        inside: whether a link may also lead to another file of the folder.

    Raises:
        CheckpointError: the link leads anywhere else.
    """
    path = folder / name
    if not lookup.is_link(path):
        return path
    target, own = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if _is_blob(target, own) or (inside and target.parent == own):
        return target
    where = "outside its folder and the hub's cache" if inside else "outside the hub's cache"
    raise CheckpointError(f"{path} is a link to {target}, {where}. Replace the link by a copy of the file.")


def _is_blob(target: Path, folder: Path) -> bool:
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            repository = above.parent.parent
            return target.parent == repository / "blobs" or target.parent.parent == repository.parent / "blobs"
    return False
