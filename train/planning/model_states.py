"""The bytes of a rank's model states, which live as long as the run, and of what comes and goes with them (no torch).

Padding is included. Per low-precision parameter, with g = 4 bytes of an fp32 gradient, 12 bytes of fp32 master and two
moments, and N ranks per ZeRO group:

    stage 0: 2 + g + 12     1: 2 + g + 12 / N     2: 2 + (g + 12) / N     3: (g + 12) / N, only fp32 shards

fp32 parameters need no masters. With bf16 moments 12 is 8. With an offloaded optimizer stage 3
has 2 / N more: shards in the parameters' dtype, beside masters that went with the other states.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ...core.buckets import Bucket, all_buckets
from ...core.dtypes import FP32, by_name
from ...core.layout import Layout
from ...core.local_params import LocalParam
from ...core.state_pieces import cut
from ..config.sections import Tier
from ..config.train_config import TrainConfig
from .backward_moments import IN_EXCHANGE, Moment, backward_moments
from .placed_bytes import TRANSFERS, PlacedBytes

FROZEN: Final = "frozen parameters"  # the name of their part


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of the model states: a run of elements of each bucket, in slots.

    Attributes:
        tier: its place.
        sizes: the elements of each bucket's run.
        slots: the bytes of an element in each slot of each bucket.
    """

    tier: Tier
    sizes: Sequence[int]
    slots: Sequence[Mapping[str, int]]

    @property
    def nbytes(self) -> int:
        """Its bytes, on disk with the padding of pieces to whole pages."""
        if self.tier == "disk":
            return sum(piece.nbytes for piece in cut(self.sizes, self.slots))
        return self.bytes_of(self.sizes)

    def bytes_of(self, sizes: Sequence[int]) -> int:
        """Returns the bytes of runs of that many elements of each bucket."""
        return sum(size * sum(slots.values()) for size, slots in zip(sizes, self.slots, strict=True))

    def buffers(self, count: int) -> int:
        """Returns the bytes of the buffers through which it is read and written; 0 if it is not on disk."""
        pieces = cut(self.sizes, self.slots) if self.tier == "disk" else ()
        return count * max((piece.nbytes for piece in pieces), default=0)


def state_parts(config: TrainConfig, layout: Layout, plans: Sequence[Bucket]) -> dict[str, StatePart]:
    """Returns the parts of the model states of a rank: those of trained buckets, and of frozen ones if there are any.

    Trained buckets have "parameters", "gradients" and "optimizer", frozen ones FROZEN.
    """
    offload, zero = config.offload, layout.zero
    itemsize = by_name(config.precision.params).itemsize
    trained = [bucket for bucket in plans if bucket.trainable]
    whole, own = [bucket.size for bucket in trained], _own_sizes(trained, layout)
    masters_apart = itemsize < FP32.itemsize and (zero < 3 or offload.optimizer != "none")
    kept = itemsize if zero < 3 or masters_apart else FP32.itemsize
    parameter, gradient = (
        [{slot: size}] * len(own) for slot, size in (("parameter", kept), ("gradient", FP32.itemsize))
    )
    apart = [bucket.family.kept_apart(holds_masters=not masters_apart) for bucket in trained]
    states = [{slot: dtype.itemsize for slot, dtype in of_bucket.items()} for of_bucket in apart]
    parts = {
        "parameters": StatePart(offload.parameters, own if zero == 3 else whole, parameter),
        "gradients": StatePart(offload.gradients, own if zero >= 2 else whole, gradient),
        "optimizer": StatePart(offload.optimizer, own, states),
    }
    if frozen := _own_sizes([bucket for bucket in plans if not bucket.trainable], layout):
        parts[FROZEN] = StatePart(offload.parameters, frozen, [{"parameter": itemsize}] * len(frozen))
    return parts


def _own_sizes(plans: Iterable[Bucket], layout: Layout) -> list[int]:
    """Returns the elements of each bucket that a rank holds as a member of its ZeRO group."""
    spreads = layout.families
    return [bucket.size // spreads[bucket.family.name].group_size for bucket in plans]


def model_state_bytes(
    config: TrainConfig, layout: Layout, params: Sequence[LocalParam], num_micro_batches: int
) -> PlacedBytes:
    """Returns the bytes of model states in each place, of buckets and gathered parameters, and of buffers."""
    plans = all_buckets(params, layout)
    parts = state_parts(config, layout, plans)
    found: dict[Tier, dict[str, int]] = {"none": {"parameters": 0}, "cpu": {}, "disk": {}}
    for name, part in parts.items():
        found[part.tier][name] = part.nbytes
    whole = sum(param.size for param in params if not param.trainable and (layout.zero < 3 or not param.sharded))
    if whole:
        found["none"][FROZEN] = found["none"].get(FROZEN, 0) + whole * by_name(config.precision.params).itemsize
    if layout.zero >= 2:
        found["none"] |= _backward(config, layout, plans)
    elif exchanged := _exchanged(config, plans, num_micro_batches):
        found["none"]["buckets"] = exchanged * FP32.itemsize
    if on_disk := _file_buffers(parts, config.offload.buffers):
        found["cpu"]["buffers of files"] = on_disk
    if stages := _transfers(parts):
        found["cpu"][TRANSFERS] = stages
    return PlacedBytes(found["none"], found["cpu"], found["disk"])


def _file_buffers(parts: Mapping[str, StatePart], count: int) -> int:
    """Returns the bytes of the buffers of all files; parameters are in one file, frozen ones behind trained ones."""
    found = {name: part.buffers(count) for name, part in parts.items()}
    frozen = found.pop(FROZEN, 0)
    return sum(found.values()) + max(frozen - found["parameters"], 0)


def exchange_copies(config: TrainConfig, layout: Layout, params: Sequence[LocalParam]) -> int:
    """Returns the bytes that exchanges of gradients take on CPUs beside `model_state_bytes`, from stage 2 on."""
    moments = _moments(config, layout, all_buckets(params, layout))
    fullest = max((each.on_cpu for each in moments), default=0)
    return fullest - max((each.on_device for each in moments), default=0)


def _moments(config: TrainConfig, layout: Layout, plans: Sequence[Bucket]) -> list[Moment]:
    itemsize = by_name(config.precision.params).itemsize
    return list(backward_moments(plans, layout, itemsize, config.zero.overlap)) if layout.zero >= 2 else []


def _backward(config: TrainConfig, layout: Layout, plans: Sequence[Bucket]) -> dict[str, int]:
    """Returns the bytes by part of the fullest moment of a backward pass, from stage 2 on."""
    nothing = Moment(0, 0, 0, 0, 0)  # a pipeline rank may train none of its parameters
    fullest = max(_moments(config, layout, plans), key=lambda each: each.on_device, default=nothing)
    parts = {"buckets": fullest.buckets, "received parts": fullest.received, "one gradient": fullest.gradient}
    return parts | ({"gathered parameters": fullest.gathered} if layout.zero == 3 else {})


def _exchanged(config: TrainConfig, plans: Sequence[Bucket], num_micro_batches: int) -> int:
    """Returns the most elements of whole gradients that come and go below stage 2, where gradients are offloaded.

    They are exchanged in a step's last backward pass only. In passes before, those of a whole stage of the pipeline are
    in memory until the pass ends.
    """
    if config.offload.gradients == "none":
        return 0
    if num_micro_batches > 1:
        return max(_sums(plans))
    sizes = sorted((bucket.size for bucket in plans), reverse=True)
    return sum(sizes[: IN_EXCHANGE + 1] if config.zero.overlap else sizes)


def _sums(plans: Iterable[Bucket]) -> Iterator[int]:
    """Yields the elements of each stage's buckets."""
    for _, members in groupby(plans, lambda bucket: bucket.stage):
        yield sum(bucket.size for bucket in members)


def _transfers(parts: Mapping[str, StatePart]) -> int:
    """Returns the pinned bytes through which an update on the host takes what a GPU has."""
    if parts["optimizer"].tier == "none":
        return 0
    stages = sum(parts[name].tier == "none" for name in ("parameters", "gradients"))
    return stages * max(parts["optimizer"].sizes, default=0) * FP32.itemsize
