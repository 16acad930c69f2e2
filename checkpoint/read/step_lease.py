"""A shared lock of a step's folder: pruning leaves a step alone as long as a process of the same host reads it."""

import os
import weakref
from pathlib import Path

from ...core.errors import StorageError
from ..files import disk_facts, locks, storage


class StepLease:
    """A step that is being read; it ends with `end`, with the last reference to it, or with the process."""

    def __init__(self, fd: int) -> None:
        self._end = weakref.finalize(self, storage.close, fd)

    def end(self) -> None:
        """Ends the lease; a second call does nothing."""
        self._end()

    @staticmethod
    def take(step: Path) -> "StepLease | None":
        """Takes the lease of a step; None if the step is being pruned, or its file system has no locks.

        Whether the step is still there is found out when it is opened.
        """
        try:
            fd = locks.open_folder(step)
        except StorageError:
            return None
        lease = StepLease(fd)
        found = os.fstat(fd)
        if locks.try_share(fd) and disk_facts.identity(step) == (found.st_dev, found.st_ino):
            return lease
        return None
