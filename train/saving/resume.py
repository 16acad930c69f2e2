"""The start of a run from its own newest good step, or from a given checkpoint, with newer steps forked off.

Nothing in the run folder is moved before the checkpoint is loaded.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...checkpoint.format.step_names import step_name
from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import Peers, open_together, share_errors
from ...checkpoint.run.locked_run import LockedRun
from ...checkpoint.run.run_view import Newest
from ...core.errors import CheckpointError, ConfigError, DamagedCheckpoint, NotCommitted

_log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Start(Generic[Loaded]):
    """One rank's view of a run that starts; every rank calls the same method.

    Attributes:
        run: the folder under its lock, on rank 0; None on other ranks.
        folder: the run folder.
        load: fills the rank from a checkpoint; if one rank cannot load, all ranks raise its error.
        world: all ranks.
        from_rank_0: returns, on every rank, the number that rank 0 passes.
    """

    run: LockedRun | None
    folder: Path
    load: Callable[[Checkpoint], Loaded]
    world: Peers
    from_rank_0: Callable[[int], int]

    def anew(self) -> None:
        """Raises ConfigError if the folder has steps, good or not."""
        with share_errors(self.world):
            steps = self.run.steps() if self.run else []
            if steps:
                raise ConfigError(
                    f"{self.folder} holds step {steps[-1][0]} of an earlier run, which `--resume never` would not "
                    "continue. Name another [checkpoint] dir, or use `--resume auto`."
                )

    def from_newest(self) -> Loaded | None:
        """Loads the run's newest good step; returns None if the run has no steps.

        Damaged steps are skipped, also those whose damage is found only when their tensors are read. Once an older step
        is loaded, they are quarantined, and the reasons are logged.

        Raises:
            NotCommitted: there are steps, and all are damaged.
            CheckpointError, StorageError: it cannot be found out whether a step is good.
        """
        skipped: dict[int, str] = {}
        while True:
            step = self.from_rank_0(self._newest_step(skipped))
            if step < 0:
                return None
            try:
                loaded = self.load(self._open(step))
            except DamagedCheckpoint as error:
                skipped[step] = f"{step_name(step)} skipped: {error}"
                continue
            self._quarantine(skipped)
            return loaded

    def from_given(self, path: Path, fork: bool) -> Loaded:
        """Loads a checkpoint of this or another run.

        Args:
            path: the checkpoint.
            fork: whether newer steps of the run are moved to forked-ATTEMPT/; otherwise they are an error.

        Raises:
            CheckpointError: the checkpoint cannot be used, or the run has newer good steps.
        """
        checkpoint = open_together(lambda: Checkpoint.open(path), self.world)
        with share_errors(self.world):
            found = self.run.newest() if self.run else Newest()
            newest = found.checkpoint.step if found.checkpoint else -1
            if checkpoint.step < newest and not fork:
                raise CheckpointError(
                    f"{self.folder} holds step {newest}, newer than step {checkpoint.step} of {checkpoint.path} that "
                    "you ask to resume: steps are never overwritten. Continue in another [checkpoint] dir, or add "
                    "--fork, which moves the newer steps to a folder of their own."
                )
        loaded = self.load(checkpoint)
        self._quarantine(found.skipped)
        with share_errors(self.world):
            moved = self.run.fork(checkpoint.step) if self.run and fork else None
            if moved:
                _log.info("steps after %d are now in %s", checkpoint.step, moved)
        return loaded

    def _open(self, step: int) -> Checkpoint:
        with share_errors(self.world):
            return Checkpoint.open(self.folder / step_name(step))

    def _newest_step(self, skipped: dict[int, str]) -> int:
        """Returns, on rank 0, the newest step that is older than all of `skipped`, and adds damaged steps to `skipped`.

        It returns -1 if there is none, and on other ranks.
        """
        with share_errors(self.world):
            if self.run is None:
                return -1
            found = self.run.newest(min(skipped, default=float("inf")))
            skipped |= found.skipped
            if found.checkpoint:
                return found.checkpoint.step
            if skipped:
                raise NotCommitted(
                    f"{self.folder} has steps, but none that can be resumed: {' '.join(skipped.values())} Nothing was "
                    "moved. To begin at step 0, name another [checkpoint] dir, or move them away."
                )
            return -1

    def _quarantine(self, skipped: Mapping[int, str]) -> None:
        with share_errors(self.world):
            if self.run:
                self.run.quarantine(skipped)
                for reason in skipped.values():
                    _log.warning("%s It is kept as .bad-%s.", reason, self.run.attempt)
