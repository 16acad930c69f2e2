"""The values of a reference that a layout is compared with, in two files: its first gradients, and updated weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..train.engine.training_engine import TrainingEngine
from .gradients import compare_gradients
from .judge import COMPARED_UPDATES
from .updates import compare_weights


@dataclass(frozen=True)
class ReferenceValues:
    """The files of one reference, in a folder of their own.

    Attributes:
        folder: the folder, which exists.
        steps: the number of steps of the runs.
    """

    folder: Path
    steps: int

    @property
    def gradients(self) -> Path:
        """The file of the first step's gradients, fp32 [elements]."""
        return self.folder / "gradients.npy"

    @property
    def weights(self) -> Path:
        """The file of the updated weights, fp32 [elements]."""
        return self.folder / "weights.npy"

    @property
    def num_updates(self) -> int:
        """The number of steps after which weights are compared."""
        return min(self.steps, COMPARED_UPDATES)

    def compare(self, step: int, engine: TrainingEngine) -> dict[str, Any]:
        """Compares the mesh's values after `step` steps with the file of that step; returns {} if there is none."""
        found: dict[str, Any] = {}
        if step == 1:
            expected = np.load(self.gradients, mmap_mode="r")
            found |= compare_gradients(engine.buffers, engine.table, expected)
        if step == self.num_updates:
            expected = np.load(self.weights, mmap_mode="r")
            found |= compare_weights(engine.optimizer, engine.table, expected)
        return found
