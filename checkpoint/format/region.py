"""Regions: runs of a box's row-major order, and copies of values from one region's memory to another's.

The row-major order of a box is the tensor's own order with other elements left out. So a run of the whole tensor meets
every box in one run, and the copy engine can read and write each stored chunk strictly forward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.casts import Array
from ...core.geometry import Box, flat_to_boxes


@dataclass(frozen=True, slots=True)
class Region:
    """Elements [start, stop) of a box in row-major order; in memory they are contiguous."""

    box: Box
    start: int
    stop: int

    @staticmethod
    def of(box: Box, flat: tuple[int, int] | None = None) -> "Region":
        """Returns the whole box, or its run `flat`, as a region."""
        return Region(box, *(flat or (0, box.size)))

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def parts(self) -> list[tuple[Box, int]]:
        """Returns the region as boxes, each with the number of the region's elements before it."""
        result, position = [], 0
        for box in flat_to_boxes(self.box, self.start, self.stop):
            result.append((box, position))
            position += box.size
        return result


def as_bytes(values: Array) -> memoryview:
    """Returns the memory of a 1-D contiguous array."""
    return values.view(np.uint8).data


def count_before(box: Box, shape: Sequence[int], position: int) -> int:
    """Returns how many elements of `box` precede element `position` of a tensor of that shape, in row-major order."""
    if position >= math.prod(shape):
        return box.size
    rest, inner, count = position, math.prod(shape), box.size
    before = 0
    for low, extent, whole in zip(box.offset, box.shape, shape, strict=True):
        if count == 0:
            return 0
        inner //= whole
        count //= extent
        digit, rest = divmod(rest, inner)
        before += min(max(digit - low, 0), extent) * count
        if not low <= digit < low + extent:
            break
    return before


def position_of(box: Box, shape: Sequence[int], element: int) -> int:
    """Returns the position of a box's element `element` in the whole tensor, both counted in row-major order."""
    position, count, rest = 0, box.size, element
    for low, extent, whole in zip(box.offset, box.shape, shape, strict=True):
        count //= extent
        digit, rest = divmod(rest, count)
        position = position * whole + low + digit
    return position


def copy_region(target: Array, target_region: Region, source: Array, source_region: Region) -> None:
    """Copies the elements that two regions share.

    Args:
        target, source: 1-D arrays of one dtype, each with exactly the elements of its region.
        target_region, source_region: the regions of the two arrays.
    """
    target_parts = target_region.parts()
    for source_box, source_at in source_region.parts():
        view = source[source_at : source_at + source_box.size].reshape(source_box.shape)
        for target_box, target_at in target_parts:
            common = source_box.intersect(target_box)
            if common:
                into = target[target_at : target_at + target_box.size].reshape(target_box.shape)
                into[common.relative_to(target_box).slices] = view[common.relative_to(source_box).slices]


def shared_span(source: Region, target: Region) -> tuple[int, int] | None:
    """Returns [first, last + 1) of the elements that `source` shares with `target`, in the order of `source`'s box.

    Elements between the two may be outside `target`. None if the regions share no element.
    """
    low, high = source.stop, source.start
    for source_box, source_at in source.parts():
        for target_box, _ in target.parts():
            common = source_box.intersect(target_box)
            if common:
                inside = common.relative_to(source_box)
                first = last = 0
                for offset, end, extent in zip(inside.offset, inside.end, source_box.shape, strict=True):
                    first, last = first * extent + offset, last * extent + end - 1
                low = min(low, source.start + source_at + first)
                high = max(high, source.start + source_at + last + 1)
    return (low, high) if low < high else None
