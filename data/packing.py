"""Documents into rows, whole where they fit: a pure function of their lengths, made once when data is opened."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

OPEN_ROWS: Final = 256  # rows that still take documents: what follows is never put into a row far back


@dataclass(frozen=True)
class Packing:
    """Which pieces each row has: row r has pieces[ends[r - 1] : ends[r]], in the order of the file.

    Attributes:
        pieces: int64, every piece once.
        ends: int64 [rows].
    """

    pieces: NDArray[np.int64]
    ends: NDArray[np.int64]

    def row(self, number: int) -> NDArray[np.int64]:
        """The pieces of a row."""
        return self.pieces[self.ends[number - 1] if number else 0 : self.ends[number]]


def pack(lengths: NDArray[np.int64], room: int) -> Packing:
    """Best fit in one pass: each piece goes where the least room is left that takes it, else into a new row.

    At most `OPEN_ROWS` rows are open; the fullest is closed for a new one. (Best fit without the bound: Johnson et al.,
    "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974.)

    Args:
        lengths: of the pieces, each from 1 to `room`.
        room: of a row.
    """
    open_rows: list[tuple[int, int]] = []  # (room left, row), rising
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    for piece, length in enumerate(lengths.tolist()):
        place = bisect_left(open_rows, (length, 0))
        if place < len(open_rows):
            left, row = open_rows.pop(place)
        else:
            left, row = room, num_rows
            num_rows += 1
        row_of[piece] = row
        if left > length:
            insort(open_rows, (left - length, row))
            if len(open_rows) > OPEN_ROWS:
                open_rows.pop(0)
    counts = np.bincount(row_of, minlength=num_rows)
    return Packing(np.argsort(row_of, kind="stable"), np.cumsum(counts))
