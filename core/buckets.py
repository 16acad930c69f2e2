"""ZeRO's flat buckets of parameters, and the shards of a bucket that each rank updates."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Final

from .families import TensorFamily
from .integers import ceil_div, round_up
from .layout import Layout
from .local_params import LocalParam, Piece

SHARD_ALIGNMENT: Final = 32  # elements; keeps every rank's shard on a 64-byte boundary, in bf16 too
LAYER_SIZE: Final = 2**28  # elements of a layer that one bucket holds; 1 GiB of gradients
ParamRange = tuple[LocalParam, int, int, int]  # parameter, its start in the rank's range, [low, high) of its elements


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """Elements [begin, end) of a bucket, or of a rank's range of it, to which one rule of the optimizer applies.

    Attributes:
        decay: whether weight decay applies.
    """

    begin: int
    end: int
    decay: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one family laid end to end in one flat buffer; those that are updated alike are neighbours.

    Attributes:
        params: the parameters, in the order of the buffer.
        offsets: the element at which each parameter begins.
        runs: the runs of parameters that are updated alike; the last one includes the padding.
        size: the number of elements, padded so that every rank of a group gets an equal, aligned range.
    """

    params: tuple[LocalParam, ...]
    offsets: tuple[int, ...]
    runs: tuple[UpdateRun, ...]
    size: int

    @property
    def family(self) -> TensorFamily:
        """The family of its parameters: the ranks that share the bucket, and the slots that they keep of it."""
        return self.params[0].family

    @property
    def stage(self) -> int:
        """The index of the parameters' stage among those of this pipeline rank."""
        return self.params[0].stage

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates its parameters; else they are frozen."""
        return self.params[0].trainable

    @property
    def unit(self) -> int | str:
        """At ZeRO stage 3, the unit of its parameters; see `LocalParam`."""
        return self.params[0].unit

    @property
    def tied(self) -> bool:
        """Whether another pipeline rank holds a copy of the bucket."""
        return self.params[0].tied

    def runs_within(self, begin: int, end: int) -> tuple[UpdateRun, ...]:
        """Returns the runs of the range [begin, end), counted from its begin."""
        cut = ((max(run.begin, begin), min(run.end, end), run.decay) for run in self.runs)
        return tuple(UpdateRun(low - begin, high - begin, decay) for low, high, decay in cut if low < high)


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous run of one logical box, which the ranks of one place in a ZeRO group update.

    Attributes:
        bucket: the index of the bucket that contains the run.
        start: the number of elements before the run in this rank's range of the bucket.
        piece: the box of a logical tensor that the run is part of.
        flat: the run as [a, b) in the row-major order of `piece.box`.
    """

    bucket: int
    start: int
    piece: Piece
    flat: tuple[int, int]


def buckets(params: Sequence[LocalParam], layout: Layout) -> tuple[Bucket, ...]:
    """Lays trainable parameters into flat buckets, last parameter first: backward finishes them in that order.

    All parameters of a bucket belong to one family, to one stage of the pipeline, and at ZeRO stage 3 to one layer.
    Tied parameters get a bucket of their own, which is then cut in the same way on the first and on the last pipeline
    rank.
    """
    return _laid_out([param for param in params if param.trainable], layout)


def frozen_buckets(params: Sequence[LocalParam], layout: Layout) -> tuple[Bucket, ...]:
    """Lays frozen parameters into buckets as `buckets` does, at ZeRO stage 3; below it every rank holds them whole."""
    frozen = [param for param in params if param.sharded and not param.trainable]
    return _laid_out(frozen, layout) if layout.zero == 3 else ()


def all_buckets(params: Sequence[LocalParam], layout: Layout) -> tuple[Bucket, ...]:
    """Returns trained and frozen buckets, in backward's order of their units; within a unit the trained ones first."""
    found = (*buckets(params, layout), *frozen_buckets(params, layout))
    if layout.zero < 3:
        return found
    places: dict[tuple[int, int | str], int] = {}
    for place, param in enumerate(reversed(params)):
        places.setdefault((param.stage, param.unit), place)
    return tuple(sorted(found, key=lambda bucket: places[bucket.stage, bucket.unit]))


def _laid_out(params: Sequence[LocalParam], layout: Layout) -> tuple[Bucket, ...]:
    def group_key(param: LocalParam) -> tuple[object, ...]:
        return param.stage, param.tied, param.unit if layout.zero == 3 else None

    groups = groupby(reversed(params), group_key)
    spreads = layout.families
    return tuple(
        _bucket(members, spreads[members[0].shared_by].group_size)
        for _, group in groups
        for members in _filled(group, layout)
    )


@dataclass(slots=True)
class _Filling:
    """A bucket that is being filled.

    Attributes:
        size: the elements of its parameters.
        last: the number of its last parameter in backward's order.
    """

    members: list[LocalParam] = field(default_factory=list)
    size: int = 0
    last: int = 0


def _filled(params: Iterable[LocalParam], layout: Layout) -> list[list[LocalParam]]:
    """Fills buckets of all families side by side; a bucket comes before those whose last parameter comes later.

    With `layer_buckets`, a layer that does not fit in what is left of a bucket begins the next one, and is cut only at
    `LAYER_SIZE`: a device with many cores wants few large messages, and small tensors travel with their layer.
    """
    params = list(params)
    found: list[_Filling] = []
    filling: dict[TensorFamily, _Filling] = {}
    most = max(layout.bucket_size, LAYER_SIZE) if layout.layer_buckets else layout.bucket_size
    layers: Counter[tuple[TensorFamily, int | str]] = Counter()  # elements of the layers that have not begun
    for param in params if layout.layer_buckets else ():
        layers[param.family, param.unit] += param.size
    for number, param in enumerate(params):
        family, size = param.family, param.size
        begun = layers.pop((family, param.unit), 0)
        bucket = filling.get(family)
        if bucket is None or bucket.size + size > most or (begun and bucket.size + begun > layout.bucket_size):
            bucket = filling[family] = _Filling()
            found.append(bucket)
        bucket.members.append(param)
        bucket.size += size
        bucket.last = number
    return [bucket.members for bucket in sorted(found, key=attrgetter("last"))]


def _bucket(params: list[LocalParam], group_size: int) -> Bucket:
    params = sorted(params, key=lambda param: not param.decay)
    ends = list(accumulate(param.size for param in params))
    size = round_up(ends[-1], group_size * SHARD_ALIGNMENT)
    runs: list[UpdateRun] = []
    for decay, alike in groupby(params, lambda param: param.decay):
        begin = runs[-1].end if runs else 0
        runs.append(UpdateRun(begin, begin + sum(param.size for param in alike), decay))
    runs[-1] = replace(runs[-1], end=size)
    return Bucket(tuple(params), (0, *ends[:-1]), tuple(runs), size)


def shards(parts: Sequence[Bucket], layout: Layout, rank: int) -> tuple[Shard, ...]:
    """Returns the runs that a rank updates, without padding: those of a member of each bucket's ZeRO group.

    With `layout.sharding` "flat", each member has an equal range of every bucket. "dim0" is the rule of PyTorch's
    `fully_shard`: member r has rows [r * n, (r + 1) * n) of every parameter, n = ceil(rows / group size), and its range
    of the bucket has these laid end to end, each padded to n rows.
    """
    cut = _flat_ranges if layout.sharding == "flat" else _row_ranges
    groups = {name: (spread.group_size, spread.place(rank).member) for name, spread in layout.families.items()}
    result: list[Shard] = []
    for index, bucket in enumerate(parts):
        for param, first, low, high in cut(bucket, *groups[bucket.family.name]):
            for piece in param.pieces:
                a, b = max(low, piece.start), min(high, piece.start + piece.box.size)
                if a < b:
                    flat = (a - piece.start, b - piece.start)
                    result.append(Shard(index, first + a - low, piece, flat))
    return tuple(result)


def _flat_ranges(bucket: Bucket, group_size: int, group_rank: int) -> Iterator[ParamRange]:
    length = bucket.size // group_size
    begin = group_rank * length
    for param, offset in zip(bucket.params, bucket.offsets, strict=True):
        low = max(begin - offset, 0)
        yield param, offset + low - begin, low, begin + length - offset


def _row_ranges(bucket: Bucket, group_size: int, group_rank: int) -> Iterator[ParamRange]:
    first = 0
    for param in bucket.params:
        row = math.prod(param.shape[1:])
        length = ceil_div(math.prod(param.shape[:1]), group_size) * row
        yield param, first, group_rank * length, (group_rank + 1) * length
        first += length
