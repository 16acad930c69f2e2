"""The speed of a disk as offload uses it: large direct reads and writes by threads, in a file without a name."""

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..checkpoint.files.disk_facts import free_bytes
from ..core.errors import StorageError

if TYPE_CHECKING:
    from ..train.zero.states.buffer import PageBuffer

PIECE: Final = 2**24  # bytes, the largest piece of states
AT_ONCE: Final = 8  # pieces
MOST_BYTES: Final = 2**31  # of the file
_Start = Callable[[memoryview, int], "list[Future[None]]"]


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """The speed of a folder's disk.

    Attributes:
        read, written: bytes per second of all threads together, reads and writes alone.
    """

    read: float
    written: float


def measure_disk(folder: Path, seconds: float = 2.0) -> DiskSpeed:
    """Writes and reads for some seconds each; at most half of the free space is used.

    Raises:
        StorageError: the folder has no room, or its disk fails.
    """
    from ..train.zero.states.buffer import PageBuffer
    from ..train.zero.states.state_file import StateFile

    count = min(MOST_BYTES, free_bytes(folder) // 2) // PIECE
    if count == 0:
        raise StorageError(
            f"The disk of {folder} has no room for a measurement, which takes at least {2 * PIECE >> 20} MiB of free "
            "space. Remove files there, or name another folder."
        )
    buffers = [PageBuffer(PIECE) for _ in range(AT_ONCE)]
    values = os.urandom(PIECE)  # a disk may compress, or leave out what is alike
    for buffer in buffers:
        buffer.memory[:] = values
    with closing(StateFile(folder, count * PIECE)) as file:
        written, reached = _rate(file.write_pages, buffers, count, seconds)
        # Reads of what was never written would not come from the disk.
        read, _ = _rate(file.read_pages, buffers, min(count, reached), seconds)
        return DiskSpeed(read, written)


def _rate(start: _Start, buffers: "list[PageBuffer]", count: int, seconds: float) -> tuple[float, int]:
    """Reads or writes pieces of the file in a circle until the time is over.

    Returns:
        bytes per second, and the number of pieces.
    """
    pending: deque[list[Future[None]]] = deque()
    number, begun = 0, time.perf_counter()
    for buffer, place in zip(cycle(buffers), cycle(range(count)), strict=False):
        if number and time.perf_counter() - begun > seconds:
            break
        if len(pending) == len(buffers):
            _wait(pending.popleft())
        pending.append(start(buffer.memory, place * PIECE))
        number += 1
    while pending:
        _wait(pending.popleft())
    return number * PIECE / (time.perf_counter() - begun), number


def _wait(pending: "list[Future[None]]") -> None:
    for each in pending:
        each.result()
