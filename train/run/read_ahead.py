"""Batches that a thread reads ahead, while the steps before them compute."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

AHEAD: Final = 2  # batches that are read or being read beside the one in use

Batch = TypeVar("Batch")


class ReadAhead(Generic[Batch]):
    """The batches of a run, in order; inside of `running` a thread reads the next ones.

    Args:
        read: reads the batch that begins at a sample.
        stride: the number of samples of a batch.
    """

    def __init__(self, read: Callable[[int], Batch], stride: int) -> None:
        self._read, self._stride = read, stride
        self._needed = 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[int, Future[Batch]]] = deque()

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Has the thread inside the block; it has ended when the block ends, after the batch that it reads then.

        Args:
            count: the number of batches that are needed; the thread reads no more.
        """
        self._needed = count
        self._thread = ThreadPoolExecutor(1, "tk-rows")
        try:
            yield
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            self._pending.clear()

    def take(self, first: int) -> Batch:
        """Returns the batch that begins at a sample.

        Raises:
            TkError: it cannot be read.
        """
        if self._thread is None:
            return self._read(first)
        if not self._pending or self._pending[0][0] != first:  # the first one, or the run goes on elsewhere
            self._drop()
            self._submit(first)
        batch = self._pending.popleft()[1]
        self._needed -= 1
        for number in range(len(self._pending), min(AHEAD, self._needed)):
            self._submit(first + self._stride * (number + 1))
        return batch.result()

    def _submit(self, sample: int) -> None:
        if self._thread is not None:
            self._pending.append((sample, self._thread.submit(self._read, sample)))

    def _drop(self) -> None:
        while self._pending:
            self._pending.pop()[1].cancel()
