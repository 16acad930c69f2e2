"""Saving one rank's share of the steps of one run: in the background once replicas agree, or in place.

In the background, a save stops training for a copy of this rank's share. Checksums of what replicas hold are taken by
a thread during the next step, up to its update; then they are compared, and only then is the writer asked to write.
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
    """A save whose values are copied and not yet written: replicas may turn out to differ."""

    step: int
    resume: Mapping[str, Any]
    checksums: Future[Checksums]


class Saver:
    """Saves one rank's share of every step.

    Args:
        lock_fd: of the run folder's lock on rank 0, -1 elsewhere.
        background: whether saves that need not wait are written by another process, from a copy of this rank's share.
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
        """Saves the state that the snapshot shows now. Returns once it is copied; if `wait` or not in the background,
        once this rank's part is durable and, on rank 0, the step is committed. Every rank calls it.

        Args:
            compared: replicas were compared since the last update.

        Raises:
            TkError: replicas have drifted, or this save or the one before it failed (a full disk, say).
        """
        self.flush_pending()
        if self._writer:
            self._writer.wait()
        if wait or not self.background:
            if not compared:
                self.replicas.check(step)
            self._save_in_place(step, resume)
            return
        if self._writer is None:
            self._writer = BackgroundSaver(self.job, self.lock_fd)
        for item in self.job.items():
            np.copyto(self._writer.buffer(item), self.snapshot.values(item))
        if self.replicas.needed and not compared:
            self._pending = _Pending(step, resume, self._thread.submit(self.replicas.checksums))
        else:
            self._writer.begin(step, resume)

    def _save_in_place(self, step: int, resume: Mapping[str, Any]) -> None:
        try:
            self.job.save(step, resume, self.snapshot.values)
        except OSError as error:
            raise TkError(
                f"Step {step} cannot be saved in {self.job.run}: {error} Steps committed before are whole; mend the "
                "cause and resume from the newest (the same command does)."
            ) from error

    def flush_pending(self) -> None:
        """Has the save that was copied last written, if replicas agree. To be called by every rank before anything
        that was saved is updated; a no-op where that is done.

        Raises:
            TkError: they have drifted; nothing of the step is written.
        """
        pending, self._pending = self._pending, None
        if pending and self._writer:
            self.replicas.compare(pending.step, pending.checksums.result())
            self._writer.begin(pending.step, pending.resume)

    def close(self, failed: bool, alone: bool = False) -> None:
        """Waits for the save in flight and ends the writer; where the run has failed, its own error is the one to
        raise, and a save on which replicas have not agreed is lost.

        Args:
            alone: other ranks are gone, and with them perhaps their parts of the save: it is not waited for for long.
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
