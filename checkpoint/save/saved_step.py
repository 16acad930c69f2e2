"""A step that was saved, as rank 0 reports it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed step.

    Attributes:
        step: the training step.
        path: the step's folder.
        num_bytes: the bytes of all its files.
        seconds: the time from the begin of writing to the commit.
    """

    step: int
    path: str
    num_bytes: int
    seconds: float

    @classmethod
    def of(cls, step: int, folder: Path, seconds: float) -> "SavedStep":
        """Describes a folder that was committed just now."""
        return cls(step, str(folder), _bytes_in(folder), seconds)


def _bytes_in(folder: Path) -> int:
    """Adds up the sizes of a folder's files; it raises nothing, since the step is committed anyway."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.stat(os.path.join(place, name)).st_size
    return found
