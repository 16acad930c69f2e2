"""Boxes: n-dimensional intervals of a tensor's indexes, by which all rooms say which part of a tensor a rank holds."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a tensor's elements: `offset[d] <= index[d] < offset[d] + shape[d]` in every dim.

    A box without dims holds one element (a scalar); a box with a zero in its shape holds none.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        """Returns the box of all elements of a tensor with that shape."""
        return Box((0,) * len(shape), tuple(shape))

    @staticmethod
    def from_bounds(bounds: Sequence[Sequence[int]]) -> "Box":
        """Builds the box that `bounds()` describes."""
        return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))

    def bounds(self) -> list[list[int]]:
        """Returns [low, high) for each dim, as a checkpoint stores it."""
        return [[low, low + extent] for low, extent in zip(self.offset, self.shape, strict=True)]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The index after the last one, for each dim."""
        return tuple(map(add, self.offset, self.shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array of the whole tensor."""
        return tuple(slice(low, low + extent) for low, extent in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """Returns the box of the elements in both boxes, or None if they share none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - low for a, b, low in zip(self.end, other.end, offset, strict=True))
        return Box(offset, shape) if all(extent > 0 for extent in shape) else None

    def contains(self, other: "Box") -> bool:
        """Returns whether every element of `other` is in this box."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.end, other.end, strict=True)
        )

    def relative_to(self, origin: "Box") -> "Box":
        """Returns this box with offsets relative to `origin`: its place in an array that holds only `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin.offset, strict=True)), self.shape)

    def flat_range(self, inner: "Box") -> tuple[int, int] | None:
        """Returns [start, stop) of `inner` in this box's row-major order, or None if it is not contiguous there."""
        relative = inner.relative_to(self)
        start = 0
        for low, extent in zip(relative.offset, self.shape, strict=True):
            start = start * extent + low
        seen_partial = False  # from the last dim backwards: all dims before the last partial one must have extent 1
        for part, extent in zip(reversed(inner.shape), reversed(self.shape), strict=True):
            if seen_partial and part != 1:
                return None
            seen_partial = seen_partial or part != extent
        return start, start + inner.size


def flat_to_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Cuts the row-major range [start, stop) of `box` into at most 2 * ndim - 1 boxes, in order.

    Each box is contiguous in the row-major order of `box` and begins at the end of the one before it.
    """
    if start >= stop:
        return
    if not box.shape:
        yield box
        return
    row = math.prod(box.shape[1:])
    first, last = start // row, (stop - 1) // row
    head, tail = start - first * row, stop - last * row
    if first == last and (head or tail < row):
        yield from _within_row(box, first, head, tail)
        return
    if head:
        yield from _within_row(box, first, head, row)
        first += 1
    full = last + 1 if tail == row else last
    if full > first:
        yield Box((box.offset[0] + first, *box.offset[1:]), (full - first, *box.shape[1:]))
    if tail < row:
        yield from _within_row(box, last, 0, tail)


def _within_row(box: Box, row: int, start: int, stop: int) -> Iterator[Box]:
    for part in flat_to_boxes(Box(box.offset[1:], box.shape[1:]), start, stop):
        yield Box((box.offset[0] + row, *part.offset), (1, *part.shape))


def covers_exactly(boxes: Iterable[Box], whole: Box) -> bool:
    """Returns whether the boxes hold every element of `whole` once and no other element.

    The time is linear in the number of boxes: up to 2^ndim operations for each.
    """
    counts = Counter(_bounds(box) for box in boxes if box.size)
    if whole.size:
        counts[_bounds(whole)] -= 1
    return _vanishes({bounds: count for bounds, count in counts.items() if count})


_Bounds: TypeAlias = tuple[tuple[int, int], ...]


def _bounds(box: Box) -> _Bounds:
    return tuple(zip(box.offset, box.end, strict=True))


def _vanishes(counts: Mapping[_Bounds, int]) -> bool:
    """Returns whether the signed sum of boxes is 0 at every element.

    Along the first dim, the sum changes only at the beginning and at the end of a box. It is 0 everywhere if each of
    these changes, which is a sum of boxes with one dim less, is 0. The end of a box mostly cancels the beginning of
    its neighbour, so few changes remain for the recursion.

    Args:
        counts: how many times each box is added (negative: subtracted), by the box's bounds; no count is 0.
    """
    if () in counts:
        return False
    changes: dict[int, dict[_Bounds, int]] = {}
    for ((low, high), *inner), count in counts.items():
        rest = tuple(inner)
        for at, change in ((low, count), (high, -count)):
            there = changes.setdefault(at, {})
            total = there.pop(rest, 0) + change
            if total:
                there[rest] = total
    return all(_vanishes(change) for change in changes.values())
