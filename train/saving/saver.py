"""Saves of one rank's share of the steps of one run: in the background once replicas agree, or in place.

A save in the background stops training only while this rank's share is copied. A thread computes the checksums of
replicated values during the next step, up to its update. Then ranks compare them, and the writer begins to write.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...checkpoint.save.background_save import BackgroundSaver
from ...checkpoint.save.save_job import SaveJob
from ...core.errors import TkError
from .replica_check import Checksums, ReplicaCheck
from .snapshot import Snapshot

_ALONE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save whose values are copied and not yet written, because the replicas have not been compared."""

    step: int
    resume: Mapping[str, Any]
    checksums: Future[Checksums]


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
        if self._writer:
            self._writer.wait()
        if wait or not self.background:
            if not compared:
                self.replicas.check(step)
            self.job.save(step, resume, self.snapshot.values)
            return
        if self._writer is None:
            self._writer = BackgroundSaver(self.job, self.lock_fd)
        for item in self.job.items():
            np.copyto(self._writer.buffer(item), self.snapshot.values(item))
        if self.replicas.needed and not compared:
            self._pending = _Pending(step, resume, self._thread.submit(self.replicas.checksums))
        else:
            self._writer.begin(step, resume)

    def flush_pending(self) -> None:
        """Compares the replicas of the save that was copied last, and starts to write it; does nothing without one.

        Every rank calls it before it updates anything that was saved.

        Raises:
            TkError: replicas differ; nothing of the step is written.
        """
        pending, self._pending = self._pending, None
        if pending and self._writer:
            self.replicas.compare(pending.step, pending.checksums.result())
            self._writer.begin(pending.step, pending.resume)

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
            if not failed:
                self.flush_pending()
            if self._writer:
                with suppress(*([TkError] if failed else [])):
                    self._writer.wait(_ALONE_SECONDS if alone else None)
        finally:
            self._thread.shutdown()
            if self._writer:
                self._writer.close()
