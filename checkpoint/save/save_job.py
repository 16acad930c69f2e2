"""A rank's save as plain data: the one way to save a step, in the rank's process or in its writer process."""

import base64
import errno
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...core import dtypes
from ...core.casts import Array
from ...core.errors import ShardMissing, StorageError
from ...core.integers import round_up
from ...core.layout import Layout
from ...core.ownership import Owned, owned
from ...core.tensors import Split, Table, TensorSpec
from ..format.adapter_record import AdapterRecord, BaseRecord
from ..format.region import Region
from ..format.step_names import pending_step
from ..run.locked_run import LockedRun
from ..run.run_folder import RunFolder
from .commit import commit
from .new_step import NewStep
from .saved_step import SavedStep
from .writer import write_part

ALIGNMENT: Final = 64  # bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The settings that all saves of one rank share.

    Attributes:
        run: the run folder, whose lock the job holds.
        attempt: `LockedRun.attempt` of the lock.
        writer: this rank; rank 0 also commits and prunes.
        table: the model's tensors, each with its slots.
        layout: the layout of the job.
        param_groups, side_files: see `NewStep`.
        keep: the number of newest steps to keep, 0 = all.
        keep_every: steps divisible by it are never pruned, 0 = none.
        timeout: seconds to wait for the parts of other ranks.
        adapter: see `NewStep`.
    """

    run: Path
    attempt: str
    writer: int
    table: Table
    layout: Layout
    param_groups: Sequence[Mapping[str, Any]] = ()
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    keep: int = 0
    keep_every: int = 0
    timeout: float = 600.0
    adapter: AdapterRecord | None = None

    def items(self) -> tuple[Owned, ...]:
        """Returns the items that this rank writes."""
        return owned(self.table, self.layout, self.writer)

    def stored_as(self) -> dict[Owned, dtypes.DType]:
        """Returns the stored dtype of each item."""
        items = self.items()
        names = {item.tensor for item in items}
        codes = {spec.name: spec.slots for spec in self.table if spec.name in names}
        return {item: dtypes.by_code(codes[item.tensor][item.slot]) for item in items}

    def save(self, step: int, resume: Mapping[str, Any], values: Callable[[Owned], Array]) -> SavedStep | None:
        """Writes this rank's part of a step; rank 0 also waits for the others', commits and prunes.

        Rank 0 prunes before too, for a run that goes on with a smaller `keep` because its disk is full. It removes the
        files of a step that fails. A step that cannot be pruned stays, with a warning.

        Args:
            step: the training step.
            resume: the state of the run, independent of the layout; plain JSON.
            values: returns the elements of an item in the form of `write_part`; called once per item, in the order of
                writing.

        Returns:
            The committed step, on rank 0; None on other ranks.

        Raises:
            CheckpointError: the step exists already, or a rank did not finish its part.
            StorageError: the disk is full or fails; the step was not saved.
        """
        run, begun = RunFolder(self.run).held_by(self.attempt) if self.writer == 0 else None, time.monotonic()
        try:
            self._prune(run)
            folder = self._write(run, step, resume, values)
            saved = SavedStep.of(step, folder, time.monotonic() - begun) if folder else None
            self._prune(run)
            return saved
        except ShardMissing:
            self._abandon(run, step)
            raise
        except OSError as error:
            self._abandon(run, step)
            cause = str(error)
            if self.writer and error.errno == errno.ENOENT:
                cause = (
                    "its folder is gone. Rank 0 removes it when it cannot save the step, and says why: see its error."
                )
            raise StorageError(
                f"Step {step} was not saved: {cause} Steps committed before are whole: mend the cause, and resume from "
                "the newest.",
                error.errno,
            ) from error

    def _prune(self, run: LockedRun | None) -> None:
        if run and self.keep:
            try:
                run.prune(self.keep, self.keep_every)
            except OSError as error:
                _log.warning("Old steps remain: %s Pruning is tried again after the next save.", error)

    def _abandon(self, run: LockedRun | None, step: int) -> None:
        if run:
            run.abandon_step(step)

    def _write(
        self, run: LockedRun | None, step: int, resume: Mapping[str, Any], values: Callable[[Owned], Array]
    ) -> Path | None:
        if run:
            run.begin_step(step)
        folder = pending_step(self.run, step, self.attempt)
        entries = [(item, dtype.code, partial(values, item)) for item, dtype in self.stored_as().items()]
        write_part(folder, self.writer, self.table, entries)
        if run is None:
            return None
        new = NewStep(step, self.table, self.layout, self.param_groups, resume, self.side_files, self.adapter)
        return commit(run, new, self.timeout)

    def to_json(self) -> dict[str, Any]:
        """Returns the job as plain data for another process."""
        return asdict(self) | {
            "run": str(self.run.absolute()),
            "side_files": {name: base64.b64encode(data).decode() for name, data in self.side_files.items()},
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "SaveJob":
        """Returns the job from the data of `to_json`."""
        specs = [
            TensorSpec(**spec | {"shape": tuple(spec["shape"]), "split": spec["split"] and Split(**spec["split"])})
            for spec in data["table"]
        ]
        changed = {
            "run": Path(data["run"]),
            "table": tuple(specs),
            "layout": Layout(**data["layout"]),
            "side_files": {name: base64.b64decode(text) for name, text in data["side_files"].items()},
            "adapter": data["adapter"]
            and AdapterRecord(data["adapter"]["config"], BaseRecord(**data["adapter"]["base"])),
        }
        return SaveJob(**data | changed)


class Buffers:
    """The places of a job's items in one block of memory.

    Args:
        without: the slots whose items have no place.
    """

    def __init__(self, job: SaveJob, without: Collection[str] = ()) -> None:
        self._places: dict[Owned, tuple[int, int, dtypes.DType]] = {}
        self.nbytes = 0
        for item, dtype in job.stored_as().items():
            if item.slot in without:
                continue
            count = Region.of(item.box, item.flat).size
            self._places[item] = (self.nbytes, count, dtype)
            self.nbytes += round_up(count * dtype.itemsize, ALIGNMENT)

    def view(self, memory: memoryview, item: Owned) -> Array:
        """Returns the 1-D array of an item's elements in `memory`, which has at least `nbytes` bytes."""
        start, count, dtype = self._places[item]
        nbytes = count * dtype.itemsize
        return np.frombuffer(memory[start : start + nbytes], dtype.numpy)
