"""Memory for weights and rows: on cache lines of its own, and, if it is large, on large pages."""

import mmap
from threading import Lock
from typing import Final

import numpy as np

from ......core.casts import Array
from ......core.integers import round_up

CACHE_LINE: Final = 64
LARGE_PAGE: Final = 2**21


def aligned(num_bytes: int) -> Array:
    """Returns zeroed uint8 [num_bytes] that begins on a cache line; the kernel commits its pages as they are used."""
    if num_bytes >= LARGE_PAGE:
        return lazy(num_bytes, large_pages=True)
    memory = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + num_bytes]


def lazy(num_bytes: int, large_pages: bool = False) -> Array:
    """Returns zeroed uint8 [num_bytes] on pages of its own, which are committed as they are written.

    Args:
        num_bytes: the size, which may exceed the memory that will be used.
        large_pages: whether the kernel may commit it in pages of 2 MiB, which makes reads of all of it faster.
    """
    if not large_pages or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, max(1, num_bytes)), np.uint8)[:num_bytes]
    # Private: Linux gives shared memory large pages only where the system's owner has allowed it.
    area = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, np.uint8)
    start = -memory.ctypes.data % LARGE_PAGE
    return memory[start : start + num_bytes]


def floats(*shape: int) -> Array:
    """Returns zeroed fp32 of a shape that begins on a cache line."""
    count = int(np.prod(shape, dtype=np.int64))
    return aligned(4 * count).view(np.float32).reshape(shape)


class Arena:
    """Memory on large pages of which parts are taken one after the other, each on cache lines of its own.

    Args:
        num_bytes: the size of all parts, each rounded up to a cache line.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = lazy(num_bytes, large_pages=True)
        self._lock = Lock()

    def take(self, num_bytes: int) -> Array:
        """Returns zeroed uint8 [num_bytes] that no other part has; threads may call it at the same time."""
        with self._lock:
            part, self._left = self._left[:num_bytes], self._left[round_up(num_bytes, CACHE_LINE) :]
        assert len(part) == num_bytes
        return part
