"""Threads in the place of a host's ranks: the same exchange, counted reads, no processes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from tk.checkpoint.read.shared_read import Peers
from tk.tests.checkpoint.faults import watched

T = TypeVar("T")
PATIENCE = 60.0  # seconds


def together(size: int, load: Callable[[Peers], T]) -> list[T | Exception]:
    """Calls `load` on that many ranks at once; returns each one's result or error."""
    meeting, said = threading.Barrier(size, timeout=PATIENCE), [b""] * size

    def rank(index: int) -> T | Exception:
        def gather(mine: bytes) -> list[bytes]:
            said[index] = mine
            meeting.wait()
            all_said = list(said)
            meeting.wait()
            return all_said

        try:
            return load(Peers(index, size, gather))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


class Reads:
    """Bytes read so far, metadata included."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, name: str, operation: Callable[..., int], *arguments: Any) -> int:
        count = operation(*arguments)
        with self._lock:
            self.nbytes += count
        return count


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Counts the bytes read through checkpoint/files/storage.py."""
    reads = Reads()
    with watched(reads, ("pread",)):
        yield reads
