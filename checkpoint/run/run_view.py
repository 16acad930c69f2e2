"""The questions that any process may ask of a run folder, whether or not it holds its lock."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..read.reader import Checkpoint
from ..read.run_steps import list_steps, newest_step


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step that counts (None if no step does), and why each newer one was skipped: step -> reason."""

    checkpoint: Checkpoint | None = None
    skipped: Mapping[int, str] = field(default_factory=dict)


class RunView:
    """A run folder to look at."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[tuple[int, Path]]:
        """(step, folder) of every step folder by its name, oldest first, whether it counts or not."""
        return list_steps(self.path)

    def newest(self, before: float = math.inf) -> Newest:
        """The newest step that counts, of those older than `before`; see `newest_step`."""
        step, skipped = newest_step(self.path, before)
        return Newest(Checkpoint(step, tuple(skipped.values())) if step else None, skipped)
