"""The read-only view of a run folder, for any process, with or without its lock."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..read.reader import Checkpoint
from ..read.run_steps import list_steps, newest_step


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest usable step (None if there is none), and the reason why each newer step was skipped, by its number."""

    checkpoint: Checkpoint | None = None
    skipped: Mapping[int, str] = field(default_factory=dict)


class RunView:
    """A run folder to read from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[tuple[int, Path]]:
        """Returns (step, folder) of every folder with a step's name, oldest first, usable or not."""
        return list_steps(self.path)

    def newest(self, before: float = math.inf) -> Newest:
        """Finds the newest usable step older than `before`; see `newest_step`."""
        step, skipped = newest_step(self.path, before)
        return Newest(Checkpoint(step, tuple(skipped.values())) if step else None, skipped)
