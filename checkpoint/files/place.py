"""Checks that a new folder can get its name and has room, before anything is written."""

import os
from pathlib import Path

from ...core.errors import ConfigError, TkError
from ...core.progress import format_bytes
from . import disk_facts


def check_place(path: Path) -> None:
    """Checks that a new folder can be made at `path`; an ordinary folder that is there is accepted.

    Raises:
        ConfigError: something else is at `path`, or the folder above it cannot hold the new one.
    """
    if path.name in ("", ".."):
        raise ConfigError(f"{path} cannot be replaced by a new folder; give the new folder's own name.")
    above = _nearest(path)
    if not above.is_dir():
        kind = "a link that leads nowhere" if above.is_symlink() else "a file"
        raise ConfigError(f"{above} is {kind}, so {path} cannot be made; name another folder.")
    if not disk_facts.may_write(above):
        raise ConfigError(f"{above} cannot be written by this user, so {path} cannot be made; name another folder.")
    if os.path.lexists(path):
        _check_kind(path)


def require_room(path: Path, num_bytes: int) -> None:
    """Raises TkError if the disk has no room for a new folder of that many bytes."""
    free = disk_facts.free_bytes(_nearest(path))
    if num_bytes > free:
        raise TkError(
            f"{path} would take {format_bytes(num_bytes)}; {format_bytes(free)} are free there. Free some space, or "
            "name a folder on another disk. Nothing was written."
        )


def _check_kind(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link (to {os.readlink(path)}), which a new folder cannot replace; name the folder itself."
        )
    if not path.is_dir():
        raise ConfigError(f"{path} exists and is a file, so it is not replaced; name another folder.")
    mounts = disk_facts.mounts_beneath(path)
    if mounts:
        raise ConfigError(
            f"{mounts[0]} is a mount point, which a new folder cannot replace; name a folder inside it."
            if mounts[0] == Path(os.path.realpath(path))
            else f"{path} holds the mount point {mounts[0]}, so it is not replaced; name another folder."
        )
    if path.samefile(os.curdir):
        raise ConfigError(f"{path} is the current folder, which a new folder would replace; name one inside it.")


def _nearest(path: Path) -> Path:
    """Returns the nearest path above that exists, of any kind."""
    return next(folder for folder in path.absolute().parents if os.path.lexists(folder))
