"""Saving a trainer's steps: replicas compared, then written in the background, or in place where one has to wait."""

from contextlib import suppress

import numpy as np

from ..checkpoint.background_save import BackgroundSaver
from ..checkpoint.save_job import SaveJob
from ..core.errors import TkError
from .replica_check import ReplicaCheck
from .snapshot import Snapshot

_ALONE_SECONDS = 2.0


class Saver:
    """Saves one rank's share of every step.

    Args:
        lock_fd: of the run folder's lock on rank 0, -1 elsewhere.
        background: whether saves but the last are written by another process, from a copy of this rank's share.
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

    def save(self, step: int, resume: dict[str, object], last: bool) -> None:
        """Saves what the snapshot shows now. Returns once it is copied; if `last` or not in the background, once this
        rank's part is durable and, on rank 0, the step is committed.

        Raises:
            TkError: replicas have drifted, or this save or the one before it failed.
            OSError: the disk is full or fails.
        """
        if self._writer:
            self._writer.wait()
        self.replicas.check(step)
        if last or not self.background:
            self.job.save(step, resume, self.snapshot.values)
            return
        if self._writer is None:
            self._writer = BackgroundSaver(self.job, self.lock_fd)
        for item in self.job.items():
            np.copyto(self._writer.buffer(item), self.snapshot.values(item))
        self._writer.begin(step, resume)

    def close(self, failed: bool, alone: bool = False) -> None:
        """Waits for the save in flight and ends the writer; where the run has failed, its own error is the one to
        tell.

        Args:
            alone: other ranks are gone, and with them perhaps their parts of the save: it is not waited for for long.
        """
        if self._writer is None:
            return
        try:
            with suppress(*([TkError] if failed else [])):
                self._writer.wait(_ALONE_SECONDS if alone else None)
        finally:
            self._writer.close()
