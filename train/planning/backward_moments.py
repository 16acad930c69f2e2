"""The memory of gradients and of gathered parameters from ZeRO stage 2 on, moment by moment of a backward pass.

A bucket is filled while those before it are exchanged, two at a time. Each has two moments: its last gradient has
arrived, and its own exchange has started, for which the older one of the two had to end.

    bucket        0         1         2
    filled     |||||||   |||||||   |||||||
    exchanged         |||||||||||||||||||        0 ends before the exchange of 2 starts
                                |||||||||||||
"""

from collections.abc import Iterator, Mapping, Sequence
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
        plans: the buckets, in the order of backward within each stage; frozen ones are gathered only.
        layout: the layout, of stage 2 or 3.
        itemsize: the bytes of a parameter.
        overlap: whether buckets are exchanged, and the next unit is gathered, while a unit computes.
    """
    groups = {name: spread.group_size for name, spread in layout.families.items()}
    for _, members in groupby(plans, lambda bucket: bucket.stage):
        of_stage = list(members)
        gathered = _gathered(of_stage, overlap) if layout.zero == 3 else [0] * len(of_stage)
        trained = [bucket for bucket in of_stage if bucket.trainable]
        if not overlap:
            gradient = max((param.size for bucket in trained for param in bucket.params), default=0)
            yield _moment(trained, [], groups, gradient * itemsize, max(gathered) * itemsize)
            yield _moment(trained[IN_EXCHANGE:], trained[:IN_EXCHANGE], groups, 0, 0)
            continue
        complete: list[Bucket] = []
        for bucket, whole in zip(of_stage, gathered, strict=True):
            if bucket.trainable:
                held = max(param.size for param in bucket.params) * itemsize, whole * itemsize
                yield _moment([bucket], complete[-IN_EXCHANGE:], groups, *held)
                complete.append(bucket)
                yield _moment([], complete[-IN_EXCHANGE:], groups, *held)
            else:
                yield _moment([], complete[-IN_EXCHANGE:], groups, 0, whole * itemsize)


def _moment(
    filled: Sequence[Bucket], exchanged: Sequence[Bucket], groups: Mapping[str, int], gradient: int, gathered: int
) -> Moment:
    """Returns a moment with these buckets, the oldest exchange first, which is waited for.

    Args:
        filled, exchanged: the buckets.
        groups: the number of ranks that exchange a bucket, by family.
        gradient, gathered: see `Moment`.
    """
    sizes = [groups[bucket.family.name] for bucket in exchanged]
    ranges = [bucket.size // size for bucket, size in zip(exchanged, sizes, strict=True)]
    # What an exchange that is not waited for has allocated but not received takes no memory of a CPU yet.
    copies = sum(own for own, size in zip(ranges, sizes, strict=True) if size > 1)
    if len(exchanged) == IN_EXCHANGE and sizes[0] > 1:
        copies += exchanged[0].size - ranges[0]
    whole, width = sum(bucket.size for bucket in (*filled, *exchanged)), FP32.itemsize
    return Moment(whole * width, sum(ranges) * width, gradient, gathered, copies * width)


def _gathered(buckets: Sequence[Bucket], prefetch: bool) -> list[int]:
    """Returns the elements that are gathered with each bucket: its unit, and the next one if that is prefetched."""
    units = [[bucket.size for bucket in members] for _, members in groupby(buckets, lambda bucket: bucket.unit)]
    following = [*(sum(unit) for unit in units[1:]), 0] if prefetch else [0] * len(units)
    return [sum(unit) + after for unit, after in zip(units, following, strict=True) for _ in unit]
