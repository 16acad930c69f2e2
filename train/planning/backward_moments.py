"""The memory of gradients and of gathered parameters from ZeRO stage 2 on, moment by moment of a backward pass.

A bucket is filled while those before it are exchanged, two at a time. Each has two moments: its last gradient has
arrived, and its own exchange has started, for which the older one of the two had to end.

    bucket        0         1         2
    filled     |||||||   |||||||   |||||||
    exchanged         |||||||||||||||||||        0 ends before the exchange of 2 starts
                                |||||||||||||
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ...core.buckets import Bucket
from ...core.dtypes import FP32
from ...core.layout import Layout

IN_EXCHANGE: Final = 2  # buckets


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of one moment.

    Attributes:
        buckets: buckets of fp32 gradients, filled or exchanged.
        received: the ranges of exchanged buckets that this rank receives.
        gradient: the gradient of one parameter, in its dtype, before it is added to its bucket.
        gathered: gathered parameters.
        copies: only on CPUs, whose exchanges collect every rank's gradients of this rank's range and then sum them.
    """

    buckets: int
    received: int
    gradient: int
    gathered: int
    copies: int

    @property
    def on_device(self) -> int:
        """The bytes on any device."""
        return self.buckets + self.received + self.gradient + self.gathered

    @property
    def on_cpu(self) -> int:
        """The bytes on a CPU."""
        return self.on_device + self.copies


def backward_moments(plans: Sequence[Bucket], layout: Layout, itemsize: int, overlap: bool) -> Iterator[Moment]:
    """Yields the moments of the backward passes of all stages.

    Args:
        plans: the buckets, in the order of backward within each stage.
        layout: the layout, of stage 2 or 3.
        itemsize: the bytes of a parameter.
        overlap: whether buckets are exchanged, and the next unit is gathered, while a unit computes.
    """
    for _, members in groupby(plans, lambda bucket: bucket.stage):
        of_stage = list(members)
        sizes = [bucket.size for bucket in of_stage]
        gathered = _gathered(of_stage, overlap) if layout.zero == 3 else [0] * len(sizes)
        gradients = [max(param.size for param in bucket.params) for bucket in of_stage]
        if not overlap:
            yield _moment(sizes, [], layout, max(gradients) * itemsize, max(gathered) * itemsize)
            yield _moment(sizes[IN_EXCHANGE:], sizes[:IN_EXCHANGE], layout, 0, 0)
            continue
        for index, size in enumerate(sizes):
            held = gradients[index] * itemsize, gathered[index] * itemsize
            yield _moment([size], sizes[max(index - IN_EXCHANGE, 0) : index], layout, *held)
            yield _moment([], sizes[max(index - IN_EXCHANGE + 1, 0) : index + 1], layout, *held)


def _moment(filled: Sequence[int], exchanged: Sequence[int], layout: Layout, gradient: int, gathered: int) -> Moment:
    """Returns a moment with buckets of these sizes, the oldest exchange first, which is waited for."""
    size, whole = layout.group_size, sum(exchanged)
    # What an exchange that is not waited for has allocated but not received takes no memory of a CPU yet.
    begun = whole // size if size > 1 else 0
    received = exchanged[0] - exchanged[0] // size if size > 1 and len(exchanged) == IN_EXCHANGE else 0
    width = FP32.itemsize
    return Moment((sum(filled) + whole) * width, whole // size * width, gradient, gathered, (begun + received) * width)


def _gathered(buckets: Sequence[Bucket], prefetch: bool) -> list[int]:
    """Returns the elements that are gathered with each bucket: its unit, and the next one if that is prefetched."""
    units = [
        [bucket.size for bucket in members] for _, members in groupby(buckets, lambda bucket: bucket.params[0].unit)
    ]
    following = [*(sum(unit) for unit in units[1:]), 0] if prefetch else [0] * len(units)
    return [sum(unit) + after for unit, after in zip(units, following, strict=True) for _ in unit]
