"""Links that stand for a checkpoint's files: those of the Hugging Face hub's cache, whose snapshots hold nothing else.

The cache lies as CACHE/models--OWNER--NAME/{blobs, snapshots/REVISION}: a name in REVISION is a link to a file in
blobs, which itself may be a link to one in CACHE/blobs/XX, shared by all repositories.
"""

import os
from pathlib import Path

from ..core.errors import CheckpointError
from . import storage


def real_path(folder: Path, name: str) -> Path:
    """The regular file behind a name in a folder: itself, or that which a link of the hub's cache leads to.

    Raises:
        CheckpointError: a link that leads anywhere but into the folder itself or the hub's cache.
    """
    path = folder / name
    if not storage.is_link(path):
        return path
    target, inside = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if target.parent == inside or _is_blob(target, inside):
        return target
    raise CheckpointError(
        f"{path} is a link to {target}, outside its folder and the hub's cache; put the file itself there."
    )


def _is_blob(target: Path, folder: Path) -> bool:
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            repository = above.parent.parent
            return target.parent == repository / "blobs" or target.parent.parent == repository.parent / "blobs"
    return False
