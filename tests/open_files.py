"""The files that a process has open."""

import os
from pathlib import Path


def open_files(process: int | None = None) -> list[Path]:
    """Returns a process's open files, this one's by default, without those that its threads close meanwhile."""
    folder = f"/proc/{process or 'self'}/fd"
    files = []
    for descriptor in os.listdir(folder):
        try:
            files.append(Path(os.readlink(f"{folder}/{descriptor}")))
        except FileNotFoundError:
            continue
    return files


def open_files_under(folder: Path) -> int:
    """Returns how many of this process's open files are in a folder, or were before they lost their names."""
    return sum(file.is_relative_to(folder) for file in open_files())
