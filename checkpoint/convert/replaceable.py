"""The folders that `--force` may replace: a checkpoint in which every file is known to belong to it."""

import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError
from ..files import lookup
from ..format.manifest import PARTS
from ..read.locate import open_folder

_NAMED: Final = 3  # names in a message


def require_replaceable(folder: Path) -> tuple[str, ...]:
    """Returns the files in a folder that is a checkpoint and holds nothing else, relative to the folder.

    Raises:
        ConfigError: the folder does not open as a checkpoint, or holds other files; the message names the first few.
    """
    names = tuple(_names(folder))
    found = {name: (folder / name).lstat() for name in names}
    states = tuple(
        (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found.values()
    )
    known = _known_files(folder, names, states)
    foreign = [name for name in names if name not in known or not stat.S_ISREG(found[name].st_mode)]
    if foreign:
        raise ConfigError(
            f"{folder} exists and holds more than a checkpoint, so it is not replaced: {_some(foreign)}. Name another "
            "folder, or move those files away."
        )
    return names


@lru_cache(maxsize=1)
def _known_files(folder: Path, names: Sequence[str], _states: Sequence[tuple[int, ...]]) -> frozenset[str]:
    """Returns the checkpoint's own files. A target is checked three times, and read again only if a file changed."""
    try:
        checkpoint = open_folder(folder)
        if checkpoint:
            checkpoint.check()
        known = frozenset(checkpoint.removable_files() if checkpoint else ())
    except CheckpointError as error:
        raise ConfigError(
            f"{folder} exists, holds {_some(names)} and does not open as a checkpoint, so it is not replaced "
            f"({error}) Name another folder, or remove that one yourself."
        ) from error
    if checkpoint is None:
        raise ConfigError(
            f"{folder} exists and is no checkpoint, so it is not replaced: it holds {_some(names)}; name another."
        )
    return known


def _names(folder: Path) -> list[str]:
    """Returns the names in a folder and in its parts/."""
    found = []
    for name in lookup.list_names(folder):
        inner = lookup.list_names(folder / name) if name == PARTS and not (folder / name).is_symlink() else []
        found += [f"{name}/{part}" for part in inner] or [name]
    return found


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {rest} more" if rest > 0 else "")
