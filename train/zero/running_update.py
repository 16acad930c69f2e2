"""An update that a thread makes while the next step's forward pass begins: each layer waits for its own buckets."""

import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol


class Updates(Protocol):
    """The newest update of all buckets, which may still run."""

    def ensure(self, index: int) -> None:
        """Returns once a bucket is updated."""

    def is_updated(self, index: int) -> bool:
        """Returns whether a bucket is updated."""


class NoUpdates:
    """Updates that never run beside anything else."""

    def ensure(self, index: int) -> None:
        """Returns at once."""

    def is_updated(self, index: int) -> bool:
        """Returns True."""
        return True


NO_UPDATES: Final = NoUpdates()


class RunningUpdate:
    """One update of all buckets, on a thread of its own.

    Args:
        work: makes the update; yields the index of each bucket once the bucket is updated.
        buckets: the indices of all buckets.
    """

    def __init__(self, work: Callable[[], Iterable[int]], buckets: Iterable[int]) -> None:
        self._updated = {bucket: threading.Event() for bucket in buckets}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="tk-update", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Iterable[int]]) -> None:
        try:
            for bucket in work():
                self._updated[bucket].set()
        except BaseException as error:  # the thread's boundary: `wait` raises it
            self._error = error
        finally:
            for event in self._updated.values():
                event.set()

    def has_ended(self, bucket: int) -> bool:
        """Returns whether `wait` would return or raise at once."""
        return self._updated[bucket].is_set()

    def wait(self, bucket: int) -> None:
        """Returns once a bucket is updated.

        Raises:
            TkError: the update failed, perhaps before it came to the bucket.
        """
        self._updated[bucket].wait()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Returns once the thread has ended; raises as `wait`."""
        self._thread.join()
        if self._error is not None:
            raise self._error
