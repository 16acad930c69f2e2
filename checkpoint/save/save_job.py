"""Saving one step of a run: what a rank is to write, as plain data, and the one way to do it, in place or elsewhere."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...core import dtypes
from ...core.casts import Array
from ...core.integers import round_up
from ...core.layout import Layout
from ...core.ownership import Owned, owned
from ...core.tensors import Split, Table, TensorSpec
from ..format.region import Region
from ..format.step_names import pending_step
from ..run.run_folder import RunFolder
from .commit import commit
from .new_step import NewStep
from .writer import write_part

ALIGNMENT: Final = 64  # bytes


@dataclass(frozen=True, slots=True)
class SaveJob:
    """What stays the same over all saves of one rank.

    Attributes:
        run: the run folder, whose lock the job holds; attempt: the lock's.
        writer: this rank; rank 0 also commits and prunes.
        slots: dtype code of each slot of an ordinary tensor (see TensorSpec.codes).
        keep: newest steps kept, 0 = all; keep_every: steps divisible by it are never pruned, 0 = none.
        timeout: seconds to wait for the parts of other ranks.
    """

    run: Path
    attempt: str
    writer: int
    table: Table
    layout: Layout
    slots: Mapping[str, str]
    param_groups: Sequence[Mapping[str, Any]] = ()
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    keep: int = 0
    keep_every: int = 0
    timeout: float = 600.0

    def items(self) -> tuple[Owned, ...]:
        """What this rank writes."""
        return owned(self.table, self.layout, self.writer, list(self.slots))

    def stored_as(self) -> dict[Owned, dtypes.DType]:
        """What each item is stored as."""
        codes = {spec.name: spec.codes(self.slots) for spec in self.table}
        return {item: dtypes.by_code(codes[item.tensor][item.slot]) for item in self.items()}

    def save(self, step: int, resume: Mapping[str, Any], values: Callable[[Owned], Array]) -> None:
        """Writes this rank's part of a step; rank 0 also waits for the others', commits and prunes.

        Args:
            resume: layout-free state of the run; plain JSON.
            values: the elements of an item, as `write_part` wants them; asked once each, in the order of writing.

        Raises:
            CheckpointError: the step is there already, or a rank did not finish its part.
            OSError: the disk is full or fails.
        """
        run = RunFolder(self.run).held_by(self.attempt) if self.writer == 0 else None
        if run:
            run.begin_step(step)
        folder = pending_step(self.run, step, self.attempt)
        entries = [(item, dtype.code, partial(values, item)) for item, dtype in self.stored_as().items()]
        write_part(folder, self.writer, self.table, entries)
        if run:
            new = NewStep(step, self.table, self.layout, self.slots, self.param_groups, resume, self.side_files)
            commit(run, new, self.timeout)
            if self.keep:
                run.prune(self.keep, self.keep_every)

    def to_json(self) -> dict[str, Any]:
        """Plain data for another process."""
        return asdict(self) | {
            "run": str(self.run.absolute()),
            "side_files": {name: base64.b64encode(data).decode() for name, data in self.side_files.items()},
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "SaveJob":
        """Reads what `to_json` made."""
        specs = [
            TensorSpec(**spec | {"shape": tuple(spec["shape"]), "split": spec["split"] and Split(**spec["split"])})
            for spec in data["table"]
        ]
        changed = {
            "run": Path(data["run"]),
            "table": tuple(specs),
            "layout": Layout(**data["layout"]),
            "side_files": {name: base64.b64decode(text) for name, text in data["side_files"].items()},
        }
        return SaveJob(**data | changed)


class Buffers:
    """Arrays for everything that a job writes, one behind the other in a block of memory."""

    def __init__(self, job: SaveJob) -> None:
        self._places: dict[Owned, tuple[int, int, dtypes.DType]] = {}
        self.nbytes = 0
        for item, dtype in job.stored_as().items():
            count = Region.of(item.box, item.flat).size
            self._places[item] = (self.nbytes, count, dtype)
            self.nbytes += round_up(count * dtype.itemsize, ALIGNMENT)

    def view(self, memory: memoryview, item: Owned) -> Array:
        """The 1-D array of an item's elements in `memory`, which has `nbytes` bytes at least."""
        start, count, dtype = self._places[item]
        nbytes = count * dtype.itemsize
        return np.frombuffer(memory[start : start + nbytes], dtype.numpy)
