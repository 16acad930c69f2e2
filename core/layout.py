"""Who owns what: the only statement of which rank holds, updates and saves which boxes of which tensor.

The optimizer, the save plan, reshard and `tk plan` all ask here. Inputs are plain data: a table of `TensorSpec`, one
per stored tensor, declared by an architecture, and a `Layout`. No torch and no processes; a layout is a value.

Floors of meaning, each built on the one before:
    split_boxes    the boxes of a tensor that tensor-parallel rank r holds
    local_params   the parameters of one (pp, tp) position: row-stacked boxes, possibly padded
    buckets        those parameters laid end to end in flat buffers, as ZeRO cuts them
    shards         the ranges of a bucket that one data-parallel rank updates
    owned          the ranges that one rank saves: every logical element of every slot exactly once over the world
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby
from typing import Any, Literal

from .errors import ParallelError
from .geometry import Box
from .tensors import Table, TensorSpec, is_owner, num_holders, num_layers, split_boxes

NEVER_CUT = 2**18  # elements; smaller tensors (1 MiB of fp32) are dealt whole to one replica
SHARD_ALIGNMENT = 32  # elements; keeps every rank's shard on a 64-byte boundary, in bf16 too


@dataclass(frozen=True, slots=True)
class Stage:
    """What lies between two cuts of the pipeline: consecutive layers; the first stage also embeds, the last one has
    the final norm and the head."""

    layers: range
    first: bool = True
    last: bool = True

    def holds(self, spec: TensorSpec) -> bool:
        """Whether a tensor lives on this stage."""
        if isinstance(spec.layer, int):
            return spec.layer in self.layers
        return self.first if spec.layer == "first" else self.last


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in the mesh."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model and its optimizer are spread over ranks; mesh order pp, dp (replicate, shard), tp; tp fastest.

    Attributes:
        virtual_stages: model chunks per pipeline rank.
        shard_size: ranks of a ZeRO group, a divisor of dp (hybrid sharding); 0 = all of dp.
        zero: ZeRO stage 0 to 3.
        bucket_size: elements of a flat bucket, at which the next one is begun.
        sharding: how ZeRO cuts a bucket: "flat" into equal ranges; "dim0" (FSDP's rule) by whole rows of parameters.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_stages: int = 1
    shard_size: int = 0
    zero: int = 0
    bucket_size: int = 2**24
    sharding: Literal["flat", "dim0"] = "flat"

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "dp", "virtual_stages", "bucket_size"):
            if getattr(self, key) < 1:
                raise ParallelError(f"{key} = {getattr(self, key)}; it must be 1 or more.")
        if self.zero not in (0, 1, 2, 3):
            raise ParallelError(f"zero stage = {self.zero}; it must be 0, 1, 2 or 3.")
        if self.shard_size and self.dp % self.shard_size:
            raise ParallelError(f"dp % shard_size = {self.dp} % {self.shard_size} must be 0; use a divisor of dp.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp

    @property
    def group_size(self) -> int:
        """Ranks over which one copy of the optimizer state is spread (1 at stage 0)."""
        return 1 if self.zero == 0 else self.shard_size or self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where a global rank stands."""
        return Coordinates(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a manifest; `Layout(**data)` reads it back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Piece:
    """One logical box inside a local parameter.

    Attributes:
        start: elements of the parameter's flat buffer before it; the box lies there contiguously in row-major order.
        owner: whether this (pp, tp) position is the lowest that holds the box, so saves it and counts its norm.
        num_holders: neighbouring tensor-parallel ranks with this very box of a split tensor (replicated kv heads),
            over which its gradient is summed; 1 for a tensor that is not split.
    """

    tensor: TensorSpec
    box: Box
    start: int
    owner: bool
    num_holders: int = 1


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter as one (pp, tp) position holds it: pieces stacked along dim 0, rows beyond them are padding.

    Attributes:
        stage: which of the position's stages it lives on.
        tied: whether another pipeline rank holds a copy of it (tied embeddings), so that their gradients are summed.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int = 0
    tied: bool = False

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Whether it takes weight decay, as tensors of 2 or more dims do."""
        return len(self.shape) >= 2

    @property
    def unit(self) -> int | str:
        """What computes with it: its decoder layer, or the end of the pipeline it lives on."""
        return self.pieces[0].tensor.layer

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates it."""
        return self.pieces[0].tensor.trainable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters laid end to end in one flat buffer, those that take weight decay first.

    Attributes:
        offsets: where each parameter begins, in elements.
        num_decay: elements before the first that takes no weight decay.
        size: elements, padded so that every rank of a group takes an equal, aligned range.
    """

    params: tuple[LocalParam, ...]
    offsets: tuple[int, ...]
    num_decay: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of one logical box that a data-parallel rank updates.

    Attributes:
        bucket: index of the bucket.
        start: elements before it in this rank's range of the bucket.
        flat: [a, b) in the row-major order of `piece.box`.
    """

    bucket: int
    start: int
    piece: Piece
    flat: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Owned:
    """What a rank saves: `flat` elements of a box (None = all of it) of one slot of a tensor."""

    tensor: str
    slot: str
    box: Box
    flat: tuple[int, int] | None = None


def stages(table: Table, layout: Layout, pp: int) -> tuple[Stage, ...]:
    """The stages of pipeline rank `pp`: layers are cut into pp x virtual_stages runs, dealt round-robin over the ranks.

    Raises:
        ParallelError: there are fewer layers than stages.
    """
    layers, count = num_layers(table), layout.pp * layout.virtual_stages
    if 1 < count > layers:
        raise ParallelError(
            f"pp x virtual_stages = {layout.pp} x {layout.virtual_stages} = {count} stages need at least that many "
            f"layers; num_hidden_layers = {layers}. Use fewer stages."
        )
    cuts = [index * layers // count for index in range(count + 1)]
    return tuple(
        Stage(range(cuts[index], cuts[index + 1]), index == 0, index == count - 1)
        for index in range(pp, count, layout.pp)
    )


def local_params(table: Table, layout: Layout, pp: int, tp: int) -> tuple[LocalParam, ...]:
    """The parameters that position (pp, tp) holds, in the table's order.

    A tied tensor is a parameter of its own only where its original is on another pipeline rank.
    """
    mine = stages(table, layout, pp)
    stage_of = {spec.name: number for number, stage in enumerate(mine) for spec in table if stage.holds(spec)}
    tied = {name for spec in table if spec.alias and layout.pp > 1 for name in (spec.name, spec.alias)}
    members: dict[str, list[TensorSpec]] = {}
    for spec in table:
        if spec.name in stage_of and spec.alias not in stage_of:
            members.setdefault(spec.param or spec.name, []).append(spec)
    return tuple(
        replace(_local_param(name, specs, layout.tp, tp), stage=stage_of[specs[0].name], tied=specs[0].name in tied)
        for name, specs in members.items()
    )


def _local_param(name: str, specs: list[TensorSpec], tp: int, rank: int) -> LocalParam:
    pieces: list[Piece] = []
    start = 0
    for spec in specs:
        for box in split_boxes(spec, tp, rank):
            pieces.append(Piece(spec, box, start, is_owner(spec, tp, rank), num_holders(spec, tp)))
            start += box.size
    first = specs[0]
    if len({spec.trainable for spec in specs}) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise ParallelError(f"{names} are one parameter, {name}: freeze all of them or none.")
    shape = list(pieces[0].box.shape)
    if len(pieces) > 1:
        shape[0] = sum(piece.box.shape[0] for piece in pieces)
    elif first.split and first.split.rule == "pad":
        if first.split.dim != 0:
            raise ParallelError(f"{first.name}: only rows can be padded, not dim {first.split.dim}.")
        shape[0] = -(-first.shape[0] // tp)
    return LocalParam(name, tuple(shape), tuple(pieces))


def buckets(params: Sequence[LocalParam], layout: Layout) -> tuple[Bucket, ...]:
    """Lays trainable parameters into flat buckets, last parameter first: backward finishes them in that order.

    A bucket belongs to one stage of the pipeline, at ZeRO stage 3 to one layer, and tied parameters have one of their
    own, so that it is cut alike at both ends of the pipeline.
    """

    def together(param: LocalParam) -> tuple[object, ...]:
        return param.stage, param.tied, param.unit if layout.zero == 3 else None

    result: list[Bucket] = []
    for _, group in groupby((param for param in reversed(params) if param.trainable), together):
        members: list[LocalParam] = []
        size = 0
        for param in group:
            if members and size + param.size > layout.bucket_size:
                result.append(_bucket(members, layout.group_size))
                members, size = [], 0
            members.append(param)
            size += param.size
        result.append(_bucket(members, layout.group_size))
    return tuple(result)


def _bucket(params: list[LocalParam], group_size: int) -> Bucket:
    params = sorted(params, key=lambda param: not param.decay)
    ends = list(accumulate(param.size for param in params))
    num_decay = sum(param.size for param in params if param.decay)
    quantum = group_size * SHARD_ALIGNMENT
    return Bucket(tuple(params), (0, *ends[:-1]), num_decay, -(-ends[-1] // quantum) * quantum)


def shards(
    parts: Sequence[Bucket], group_size: int, group_rank: int, sharding: Literal["flat", "dim0"] = "flat"
) -> tuple[Shard, ...]:
    """What member `group_rank` of a ZeRO group updates, padding left out.

    "flat": its equal range of every bucket. "dim0": rows [r * n, (r + 1) * n) of every parameter, n = ceil(rows /
    group_size), laid end to end, each padded to n rows; the rule of PyTorch's `fully_shard`.
    """
    cut = _flat_ranges if sharding == "flat" else _row_ranges
    result: list[Shard] = []
    for index, bucket in enumerate(parts):
        for param, first, low, high in cut(bucket, group_size, group_rank):
            for piece in param.pieces:
                a, b = max(low, piece.start), min(high, piece.start + piece.box.size)
                if a < b:
                    flat = (a - piece.start, b - piece.start)
                    result.append(Shard(index, first + a - low, piece, flat))
    return tuple(result)


ParamRange = tuple[LocalParam, int, int, int]  # [low, high) elements of a parameter, and what lies before them


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
        length = -(-math.prod(param.shape[:1]) // group_size) * row
        yield param, first, group_rank * length, (group_rank + 1) * length
        first += length


def owned(table: Table, layout: Layout, rank: int, slots: Sequence[str] = ("weight",)) -> tuple[Owned, ...]:
    """What a rank saves of each slot. Over the world, every logical element of every slot has exactly one owner.

    Weights held by all of dp are dealt out: as whole tensors at tp = 1 (so that the folder is a valid Hugging Face
    one), by equal flat ranges otherwise. Sharded slots are saved as they lie, without gathering.

    Args:
        slots: "weight" and the optimizer's own, such as "master", "exp_avg", "exp_avg_sq".
    """
    at = layout.coordinates(rank)
    params = local_params(table, layout, at.pp, at.tp)
    whole = [(piece, (0, piece.box.size)) for param in params for piece in param.pieces if piece.owner]
    trainable = [run for run in whole if run[0].tensor.trainable]
    frozen = [run for run in whole if not run[0].tensor.trainable]
    group = layout.group_size
    mine = [
        (shard.piece, shard.flat)
        for shard in shards(buckets(params, layout), group, at.dp % group, layout.sharding)
        if shard.piece.owner
    ]
    result: list[Owned] = []
    for slot in slots:
        if slot == "weight" and layout.zero < 3:
            runs = _deal(whole, layout.dp, at.dp, cut=layout.tp > 1)
        elif layout.zero == 0:
            runs = _deal(trainable, layout.dp, at.dp, cut=True)
        else:
            runs = _deal(mine, layout.dp // group, at.dp // group, cut=True)
            if slot == "weight":
                runs += _deal(frozen, layout.dp, at.dp, cut=True)
        if slot == "weight" and at.dp == 0:  # no element to deal out, but the tensor is there all the same
            runs = runs + [run for run in whole if 0 in run[0].tensor.shape]
        for piece, (a, b) in runs:
            flat = None if (a, b) == (0, piece.box.size) else (a, b)
            result.append(Owned(piece.tensor.name, slot, piece.box, flat))
    return tuple(result)


Run = tuple[Piece, tuple[int, int]]


def _deal(runs: Sequence[Run], num_replicas: int, replica: int, cut: bool) -> list[Run]:
    """The share of `replica`: large runs cut into equal parts, the others whole to whoever has least so far."""
    mine: list[Run] = []
    small: list[Run] = []
    for piece, (a, b) in runs:
        if cut and b - a >= NEVER_CUT and num_replicas > 1:
            low, high = (a + (b - a) * i // num_replicas for i in (replica, replica + 1))
            mine.append((piece, (low, high)))
        elif b > a:
            small.append((piece, (a, b)))
    loads = [0] * num_replicas
    for piece, (a, b) in sorted(small, key=lambda run: run[1][0] - run[1][1]):
        lightest = loads.index(min(loads))
        loads[lightest] += b - a
        if lightest == replica:
            mine.append((piece, (a, b)))
    return mine
