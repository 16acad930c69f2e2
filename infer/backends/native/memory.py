"""Memory for weights and rows: on cache lines of its own, and, if it is large, on large pages."""

import mmap
from typing import Final

import numpy as np

from ...scheduling.step_plan import Array

CACHE_LINE: Final = 64
_LARGE: Final = 2**21  # the size of a large page


def aligned(num_bytes: int) -> Array:
    """Returns zeroed uint8 [num_bytes] that begins on a cache line; the kernel commits its pages as they are used."""
    if num_bytes >= _LARGE:
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
    area = mmap.mmap(-1, max(1, num_bytes))
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)[:num_bytes]


def floats(*shape: int) -> Array:
    """Returns zeroed fp32 of a shape that begins on a cache line."""
    count = int(np.prod(shape, dtype=np.int64))
    return aligned(4 * count).view(np.float32).reshape(shape)
