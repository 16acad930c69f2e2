"""The places of states in a file: ranges of buckets in pieces that are read, updated and written at once (no torch)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .integers import round_up

PAGE: Final = 4096  # bytes, to which direct reads and writes are aligned
PIECE: Final = 2**20  # elements of a piece, so that it has 4 to 16 MiB in all of its slots


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements [begin, end) of a rank's range of a bucket, in all of its slots.

    Attributes:
        index: the piece's number.
        bucket: the index of the bucket.
        place: the byte of its first slot in the file.
        nbytes: its bytes in all slots, whole pages.
        slots: the byte of each slot within the piece, on a page of its own.
    """

    index: int
    bucket: int
    begin: int
    end: int
    place: int
    nbytes: int
    slots: Mapping[str, int]


def cut(sizes: Sequence[int], itemsizes: Sequence[Mapping[str, int]], piece: int = PIECE) -> tuple[StatePiece, ...]:
    """Cuts the ranges of all buckets into pieces, which lie one after another in the file.

    Args:
        sizes: the elements of each range.
        itemsizes: the bytes of an element in each slot of each range.
        piece: the most elements of a piece.
    """
    pieces: list[StatePiece] = []
    place = 0
    for bucket, (size, of_slots) in enumerate(zip(sizes, itemsizes, strict=True)):
        for begin in range(0, size, piece):
            end, slots, nbytes = min(begin + piece, size), {}, 0
            for slot, itemsize in of_slots.items():
                slots[slot] = nbytes
                nbytes += round_up((end - begin) * itemsize, PAGE)
            pieces.append(StatePiece(len(pieces), bucket, begin, end, place, nbytes, slots))
            place += nbytes
    return tuple(pieces)
