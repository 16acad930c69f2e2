"""Checkpoints of a model in training: one rank's side of saving and loading, for `Trainer` and `initialize`."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.format.adapter_record import AdapterRecord
from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import ALONE, Peers, share_errors
from ...checkpoint.run.locked_run import LockedRun
from ...checkpoint.run.run_folder import RunFolder
from ...checkpoint.save.save_job import SaveJob
from ...model.peers import peers
from ...parallel.collectives import broadcast
from ...parallel.mesh import Mesh
from ..config.train_config import param_groups
from ..engine.training_engine import TrainingEngine
from ..health.flight_recorder import is_peer_loss
from ..records.run_files import REPLACED
from ..state.stored_state import LossScaleState
from .replica_check import ReplicaCheck
from .save_in_flight import SaveInFlight
from .saver import Saver
from .snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The settings with which the steps of a run are saved.

    Attributes:
        folder: the run folder.
        keep: the number of newest steps that are kept; 0 = all.
        keep_every: steps divisible by it are never pruned; 0 = none.
        background: whether training goes on while a step is written, from a copy.
        timeout: seconds to wait for the parts of other ranks.
        side_files: the files beside the tensors, by name; those of rank 0 are written.
        adapter: the record of the adapter, on rank 0, if the run trains one.
    """

    folder: Path
    keep: int = 0
    keep_every: int = 0
    background: bool = True
    timeout: float = 600.0
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    adapter: AdapterRecord | None = None


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run folder that this job writes.

    Attributes:
        locked: the folder under its lock, on rank 0; None on other ranks.
        attempt: the attempt of the lock, on every rank.
        saver: this rank's saver.
    """

    locked: LockedRun | None
    attempt: str
    saver: Saver


class Checkpointer:
    """Saves and loads the training state of one rank.

    Args:
        engine: the rank's engine.
        mesh: the rank's groups.

    Attributes:
        ranks: all ranks, in the form that loading needs.
    """

    def __init__(self, engine: TrainingEngine, mesh: Mesh) -> None:
        self.engine = engine
        self.mesh = mesh
        self.snapshot = Snapshot(engine.optimizer)
        self.replicas = ReplicaCheck(self.snapshot, mesh)
        self.ranks = peers(mesh.world)
        self._open: OpenRun | None = None
        self._in_flight: SaveInFlight | None = None

    @contextmanager
    def open(self, options: SaveOptions) -> Iterator[OpenRun]:
        """Holds the run folder's lock, on rank 0, inside the block, and waits at its end for the save in flight.

        Every rank enters it.

        Raises:
            CheckpointError: another job writes there.
            TkError: the last save failed; raised at the end of the block.
        """
        with ExitStack() as stack:
            with share_errors(self.ranks):
                is_first = self.mesh.world.rank == 0
                locked = stack.enter_context(RunFolder(options.folder, REPLACED).lock()) if is_first else None
            attempt = f"{self.from_rank_0(int(locked.attempt, 16) if locked else 0):08x}"
            lock_fd = locked.lock_fd if locked else -1
            job = self._job(options, attempt)
            run = OpenRun(locked, attempt, Saver(job, self.snapshot, self.replicas, lock_fd, options.background))
            self._open = run
            try:
                yield run
            except BaseException as error:
                run.saver.close(failed=True, alone=is_peer_loss(error))
                raise
            finally:
                self._open = None
            run.saver.close(failed=False)

    def _job(self, options: SaveOptions, attempt: str) -> SaveJob:
        optimizer, rank = self.engine.optimizer, self.mesh.world.rank
        return SaveJob(
            run=options.folder,
            attempt=attempt,
            writer=rank,
            table=self.snapshot.table,
            layout=self.mesh.layout,
            param_groups=param_groups(optimizer.options, self.snapshot.table),
            side_files=options.side_files if rank == 0 else {},
            keep=options.keep,
            keep_every=options.keep_every,
            timeout=options.timeout,
            adapter=options.adapter,
        )

    def from_rank_0(self, number: int) -> int:
        """Returns the number that rank 0 passes; every rank calls it."""
        return int(broadcast(torch.tensor(number, dtype=torch.int64, device=self.engine.device), self.mesh.world))

    def flush_pending(self) -> None:
        """Calls `Saver.flush_pending` if a run is open; every rank calls it before each update."""
        run = self._open
        if run:
            run.saver.flush_pending()

    def save_alone(self, options: SaveOptions, step: int, resume: Mapping[str, Any], *, wait: bool) -> None:
        """Saves one step in a run folder whose lock is held for this save only; every rank calls it.

        Before the call returns, replicas are compared and this rank's share is copied. Then a process writes the copy,
        and the lock is held until the step is committed; `finish_save` waits for that. With `wait`, the step is
        committed when the call returns.

        Raises:
            CheckpointError: the step exists already, or another job writes in the folder.
            TkError: replicas differ, or this save or the one before it failed; all ranks raise it.
        """
        with share_errors(self.ranks):
            self.finish_save()
        self.replicas.check(step)
        with ExitStack() as stack:
            run = stack.enter_context(self.open(options))
            with share_errors(self.ranks):
                if run.locked:
                    run.locked.begin_step(step)
            with share_errors(self.ranks):
                run.saver.save(step, resume, wait=wait, compared=True)
            if not wait:
                self._in_flight = SaveInFlight(stack.pop_all().close)

    def finish_save(self) -> None:
        """Returns once this rank's part of the save in flight is durable and, on rank 0, the step is committed.

        Raises:
            TkError: the save failed.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight:
            in_flight.wait()

    def load(
        self,
        checkpoint: Checkpoint,
        optimizer_step: int,
        loss_scale: LossScaleState | None,
        readers: Peers = ALONE,
    ) -> None:
        """Fills parameters and optimizer states from a checkpoint of any layout; every rank calls it.

        Args:
            optimizer_step: the number of updates before it.
            loss_scale: the stored loss scale; None if there is none.
            readers: the ranks of this host, which share their reads.

        Raises:
            CheckpointError: the checkpoint is not of this model, or one rank cannot read it; all ranks raise it.
        """
        with share_errors(self.ranks):
            self.snapshot.load(checkpoint, readers)
        self.snapshot.publish()
        self.engine.optimizer.step_count = optimizer_step
        self.engine.loss_scale.restore(loss_scale)

    def load_weights(
        self, checkpoint: Checkpoint, readers: Peers = ALONE, without: frozenset[str] = frozenset()
    ) -> None:
        """Fills parameters from a checkpoint, as `load` does, but for those in `without`; optimizer states stay."""
        with share_errors(self.ranks):
            self.snapshot.load_weights(checkpoint, readers, without)
        self.snapshot.publish()
