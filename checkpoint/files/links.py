"""Links that stand for a checkpoint's files: those of the Hugging Face hub's cache, whose snapshots hold nothing else.

The cache lies as CACHE/models--OWNER--NAME/{blobs, snapshots/REVISION}: a name in REVISION is a link to a file in
blobs, which itself may be a link to one in CACHE/blobs/XX, shared by all repositories.
"""

import os
from pathlib import Path

from ...core.errors import CheckpointError
from . import lookup


def real_path(folder: Path, name: str, inside: bool = False) -> Path:
    """The regular file behind a name in a folder: itself, or that which a link of the hub's cache leads to.

    Args:
        inside: whether a link may lead to another file of the folder, too.

    Raises:
        CheckpointError: a link that leads anywhere else.
    """
    path = folder / name
    if not lookup.is_link(path):
        return path
    target, own = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if _is_blob(target, own) or (inside and target.parent == own):
        return target
    where = "outside its folder and the hub's cache" if inside else "outside the hub's cache"
    raise CheckpointError(f"{path} is a link to {target}, {where}; put the file itself there.")


def _is_blob(target: Path, folder: Path) -> bool:
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            repository = above.parent.parent
            return target.parent == repository / "blobs" or target.parent.parent == repository.parent / "blobs"
    return False
