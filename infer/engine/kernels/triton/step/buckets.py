"""The numbers of rows for which a step of single tokens is captured as a graph.

A graph has a fixed number of rows. A step takes the smallest bucket that holds its rows; the others of the bucket are
padding, which stores nothing and sees nothing.
"""

from collections.abc import Sequence
from typing import Final

_FIRST: Final = (1, 2, 4)
_STEP: Final = 8
MOST_ROWS: Final = 256  # of the largest bucket: steps of more rows take no launch of kernels to bound them


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Returns the ascending sizes of buckets for steps of up to `most` rows: 1, 2, 4, then multiples of 8.

    The last one holds `most` rows, or `MOST_ROWS` if that is less.
    """
    most = min(most, MOST_ROWS)
    first = [size for size in _FIRST if size < most]
    rest = range(_STEP, most + _STEP, _STEP) if most > _FIRST[-1] else (most,)
    return (*first, *rest)


def bucket_of(rows: int, sizes: Sequence[int]) -> int | None:
    """Returns the smallest bucket that holds so many rows; None if none does."""
    return next((size for size in sizes if size >= rows), None)
