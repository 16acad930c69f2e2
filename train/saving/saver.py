"""Saves of one rank's share of the steps of one run: in the background once replicas agree, or in place.

A save in the background stops training only while this rank's share is copied; on a GPU the copies go on beside the
next step, up to its update. A thread computes the checksums of replicated values meanwhile. Then ranks compare them,
and the writer begins to write.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoint.save.background_save import BackgroundSaver
from ...checkpoint.save.save_job import SaveJob
from ...checkpoint.save.saved_step import SavedStep
from ...checkpoint.save.state_source import Segments, StateSource
from ...core.casts import Array
from ...core.errors import TkError
from ...core.ownership import Owned
from ...parallel.collectives import all_reduce_max
from ..records.run_events import report_save
from .pinned_save import PinnedSave
from .replica_check import Checksums, ReplicaCheck
from .snapshot import Snapshot

_ALONE_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save that is not yet written: its values are still being copied, or the replicas have not been compared.

    Attributes:
        checksums: those of replicas; None if they need not be compared.
    """

    step: int
    resume: Mapping[str, Any]
    segments: Segments
    checksums: Future[Checksums] | None


class Saver:
    """Saves one rank's share of every step.

    Args:
        job: the settings of all saves.
        snapshot: the rank's training state.
        replicas: compares replicas.
        lock_fd: the descriptor of the run folder's lock on rank 0; -1 on other ranks.
        background: whether another process writes the saves that need not wait, from a copy of this rank's share.
    """

    def __init__(
        self, job: SaveJob, snapshot: Snapshot, replicas: ReplicaCheck, lock_fd: int, background: bool
    ) -> None:
        self.job = job
        self.snapshot = snapshot
        self.replicas = replicas
        self.lock_fd = lock_fd
        self.background = background
        self._writer: BackgroundSaver | None = None
        self._thread = ThreadPoolExecutor(1, "tk-checksums")
        self._pending: _Pending | None = None
        self._pinned: PinnedSave | None = None
        self._source: StateSource | None = None

    def save(self, step: int, resume: Mapping[str, Any], *, wait: bool, compared: bool = False) -> None:
        """Saves the present state of the snapshot; every rank calls it.

        A background save returns once the state is copied. Any other save returns once this rank's part is durable and,
        on rank 0, the step is committed.

        Args:
            step: the training step.
            resume: the state of the run, independent of the layout; plain JSON.
            wait: whether the save is done in place.
            compared: whether replicas were compared since the last update.

        Raises:
            TkError: replicas differ, or this save or the one before it failed (because of a full disk, for example).
        """
        self.flush_pending()
        self._end_write()
        if wait or not self.background or not self._can_go_on():
            if not compared:
                self.replicas.check(step)
            _report(self.job.save(step, resume, self.snapshot.values))
            return
        writer, segments = self._writer, {}
        if writer is None:
            writer = self._writer = BackgroundSaver(self.job, self.lock_fd, self._source)
            self._pinned = PinnedSave.of(writer.memory, self.snapshot.buffers.device)
        targets: dict[Owned, Array] = {}
        for item in self.job.items():
            if item.slot in writer.source.slots:
                segments[item] = self.snapshot.segments(item)
            else:
                targets[item] = writer.buffer(item)
        if self._pinned:
            self._pinned.start(self.snapshot, targets)
        for item, target in () if self._pinned else targets.items():
            self.snapshot.copy(item, target)
        compares = self.replicas.needed and not compared
        checksums = self._thread.submit(self.replicas.checksums) if compares else None
        self._pending = _Pending(step, resume, segments, checksums)
        if compared or not (compares or self._pinned):
            self.flush_pending()

    def _can_go_on(self) -> bool:
        """Keeps states on disk, if there are any, as they are now; returns False if a rank has no place for others.

        All ranks answer alike: one that waits for a commit would wait for ever for ranks that wait for its checksums.
        """
        optimizer, world = self.snapshot.optimizer, self.replicas.mesh.world
        if not optimizer.has_file:
            return True
        self._source = optimizer.pin()
        is_full = torch.tensor(self._source is None, dtype=torch.int32, device=self.snapshot.buffers.device)
        if not all_reduce_max(is_full, world):
            return True
        optimizer.unpin()
        if world.rank == 0:
            _log.warning(
                "The disk of the optimizer's states has no place for a second copy of them, so training waits while "
                "a step is saved. Free some space there, or use another [offload] folder."
            )
        return False

    def _end_write(self, timeout: float | None = None) -> None:
        """Waits for the writer; states on disk may change then."""
        try:
            if self._writer:
                _report(self._writer.wait(timeout))
        finally:
            self.snapshot.optimizer.unpin()

    def report_news(self) -> None:
        """Reports the step that was saved in the background, if it is committed by now; it never waits."""
        if self._writer:
            _report(self._writer.news())

    def flush_pending(self) -> None:
        """Compares the replicas of the save that was copied last, and starts to write it; does nothing without one.

        It waits for the copies. Every rank calls it before it updates anything that was saved.

        Raises:
            TkError: replicas differ; nothing of the step is written.
        """
        pending, self._pending = self._pending, None
        if pending and self._writer:
            if self._pinned:
                self._pinned.wait()
            if pending.checksums:
                self.replicas.compare(pending.step, pending.checksums.result())
            self._writer.begin(pending.step, pending.resume, pending.segments)

    def close(self, failed: bool, alone: bool = False) -> None:
        """Waits for the save in flight and ends the writer.

        Args:
            failed: whether the run has failed. Then the caller raises the run's own error, so errors of the save are
                dropped, and a save whose replicas were not compared is lost.
            alone: whether other ranks have ended, perhaps without their parts of the save; then the wait is short.

        Raises:
            TkError: the save failed, and the run has not.
        """
        try:
            with suppress(*([TkError, RuntimeError] if failed else [])):  # CUDA's errors are RuntimeErrors
                if not failed or (self._pending and not self._pending.checksums):
                    self.flush_pending()
            with suppress(*([TkError] if failed else [])):
                self._end_write(_ALONE_SECONDS if alone else None)
        finally:
            if self._pinned:
                self._pinned.close()
            self._thread.shutdown()
            if self._writer:
                self._writer.close()


def _report(saved: SavedStep | None) -> None:
    if saved is not None:
        report_save(saved)
