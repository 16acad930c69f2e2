"""Facts about a place on disk before anything is written there: free space, permissions and mount points."""

import os
import re
from pathlib import Path

from . import lookup
from .storage_errors import error_context


def free_bytes(folder: Path) -> int:
    """Returns the number of bytes that can still be written beneath a folder."""
    with error_context(folder, "looked at"):
        found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def may_write(folder: Path) -> bool:
    """Returns whether this user may add names to a folder and remove names from it."""
    with error_context(folder, "looked at"):
        return os.access(folder, os.W_OK | os.X_OK)


def identity(path: Path) -> tuple[int, int] | None:
    """Returns the device and inode of what lies at a path, through whichever mount; None if nothing is there."""
    with error_context(path, "looked at"):
        found = lookup.find(path, lambda: os.stat(path))
    return (found.st_dev, found.st_ino) if found else None


def mounts_beneath(folder: Path) -> list[Path]:
    """Returns the mount points of file systems or single files: the folder itself, if it is one, and those inside."""
    real = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except FileNotFoundError:  # no Linux
        return [Path(real)] if os.path.ismount(real) else []
    octal = re.compile(rb"\\([0-7]{3})")  # mountinfo escapes spaces and other special bytes as octal codes
    places = {os.fsdecode(octal.sub(lambda code: bytes([int(code[1], 8)]), line.split()[4])) for line in lines}
    return sorted(Path(place) for place in places if place == real or place.startswith(os.path.join(real, "")))
