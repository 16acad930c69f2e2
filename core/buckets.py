"""Parameters in flat buckets, and the shards of them that data-parallel ranks update, as ZeRO cuts them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, Literal

from .integers import ceil_div, round_up
from .layout import Layout
from .local_params import LocalParam, Piece

SHARD_ALIGNMENT: Final = 32  # elements; keeps every rank's shard on a 64-byte boundary, in bf16 too
ParamRange = tuple[LocalParam, int, int, int]  # [low, high) elements of a parameter, and what lies before them


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
    return Bucket(tuple(params), (0, *ends[:-1]), num_decay, round_up(ends[-1], quantum))


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
