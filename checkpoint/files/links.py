"""Symbolic links in place of a checkpoint's files, as the Hugging Face hub's cache, DVC and `ln -s` make them."""

import os
import re
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError
from . import lookup

_CONTENT_NAME: Final = re.compile(r"[0-9a-f]{30,}")  # MD5 without two digits (DVC), SHA-1 or SHA-256 (hub)


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


def stands_for_copy(link: Path, target: Path) -> bool:
    """Returns whether a link leads to a file of its own folder or its own name, or to one that is named by its content.

    Another link may lead to anything that this user can read; a copy of the target would carry that away.
    """
    inside = target.parent == Path(os.path.realpath(link.parent))
    return inside or target.name == link.name or _CONTENT_NAME.fullmatch(target.name) is not None
