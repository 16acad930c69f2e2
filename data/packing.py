"""The packing of documents into rows: a pure function of their lengths, computed once when data is opened."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

OPEN_ROWS: Final = 256  # rows that still take documents; the bound keeps the documents of a row close in the file


@dataclass(frozen=True)
class Packing:
    """The pieces of each row: row r has pieces[ends[r - 1] : ends[r]], in the order of the file.

    Attributes:
        pieces: int64 [pieces], the number of every piece once, sorted by row.
        ends: int64 [rows], the end of each row in `pieces`.
    """

    pieces: NDArray[np.int64]
    ends: NDArray[np.int64]

    def row(self, number: int) -> NDArray[np.int64]:
        """Returns the numbers of the pieces in a row."""
        return self.pieces[self.ends[number - 1] if number else 0 : self.ends[number]]


def pack(lengths: NDArray[np.int64], room: int) -> Packing:
    """Packs pieces by best fit, in one pass: each goes into the fullest open row that has room, or into a new row.

    At most `OPEN_ROWS` rows are open; beyond that the fullest is closed. (Best fit without the bound: Johnson et al.,
    "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974.)

    Args:
        lengths: int64 [pieces], each from 1 to `room`.
        room: the number of places in a row.
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
