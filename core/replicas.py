"""Replicated values: which ranges of which tensors several ranks hold, so that their copies can be compared."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .buckets import buckets, shards
from .layout import Layout
from .local_params import Piece, local_params
from .ownership import Owned
from .places import Coordinates
from .tensors import Table, num_holders


@dataclass(frozen=True, slots=True)
class Shared:
    """The ranges to compare along each mesh axis of one rank, in an order that is the same on all ranks of the axis.

    A chain of neighbours connects any two ranks that hold the same range. So if all neighbours agree, all ranks agree.

    Attributes:
        shard: ranges that every rank of the shard group holds.
        replicate: ranges that every rank of the replicate group holds.
        tp: ranges that two or more ranks of the tp group hold, perhaps not this one.
        embedding: ranges that the first and the last pipeline rank both hold (tied embeddings).
    """

    shard: tuple[Owned, ...]
    replicate: tuple[Owned, ...]
    tp: tuple[Owned, ...]
    embedding: tuple[Owned, ...]


def shared_by_axis(table: Table, layout: Layout, at: Coordinates) -> Shared:
    """Returns the ranges that the rank at `at` compares along each axis.

    The function looks at the shares of this rank and its neighbours only, so its time does not grow with the world.
    """
    member = layout.dense.place(layout.rank(at)).member
    mine = _held(table, layout, at.pp, at.tp, member)
    at_ends = layout.pp > 1 and at.pp in (0, layout.pp - 1) and any(spec.alias for spec in table)
    return Shared(
        shard=tuple(item for item in mine if item.slot == "weight" and item.flat is None)
        if layout.group_size > 1
        else (),
        replicate=tuple(mine) if layout.data > layout.group_size else (),
        tp=_held_twice(_held(table, layout, at.pp, tp, member) for tp in range(layout.tp)) if layout.tp > 1 else (),
        embedding=_held_twice(_held(table, layout, pp, at.tp, member) for pp in (0, layout.pp - 1)) if at_ends else (),
    )


def any_replicated(table: Table, layout: Layout) -> bool:
    """Returns whether any two ranks hold the same range; the answer is the same on every rank."""
    frozen = any(not spec.trainable for spec in table)
    over_tp = any(spec.split is None or num_holders(spec, layout.tp) > 1 for spec in table)
    tied = any(spec.alias for spec in table)
    return (
        layout.data > layout.group_size
        or (layout.data > 1 and (layout.zero < 3 or frozen))
        or (layout.tp > 1 and over_tp)
        or (layout.pp > 1 and tied)
    )


def replicated(table: Table, layout: Layout) -> tuple[Owned, ...]:
    """Returns every range of a slot that two or more ranks hold, in an order that is the same on all ranks.

    Below ZeRO stage 3 all data ranks hold the same weights. The replicas of an optimizer shard hold the same
    other slots. Tensor-parallel ranks may share a tensor, and with tied embeddings the first and the last pipeline
    rank do. The function visits every rank of the layout: it takes seconds for thousands of ranks.
    """
    holders: Counter[Owned] = Counter()
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for member in range(layout.group_size):
                for item in _held(table, layout, pp, tp, member):
                    holders[item] += layout.dense.num_copies
    return tuple(item for item, count in holders.items() if count > 1)


def _held(table: Table, layout: Layout, pp: int, tp: int, member: int) -> list[Owned]:
    """Returns the keys of all ranges that one rank holds; `member` is its number in its shard group."""
    params = local_params(table, layout, pp, tp)
    pieces = [piece for param in params for piece in param.pieces]
    found = [weight_key(piece) for piece in pieces if layout.zero < 3 or not piece.tensor.trainable]
    runs = shards(buckets(params, layout), layout.group_size, member, layout.sharding)
    return found + [run_key(slot, run.piece, run.flat) for run in runs for slot in sharded_slots(run.piece, layout)]


def _held_twice(ranks: Iterable[list[Owned]]) -> tuple[Owned, ...]:
    counts = Counter(item for held in ranks for item in held)
    return tuple(item for item, count in counts.items() if count > 1)


def sharded_slots(piece: Piece, layout: Layout) -> tuple[str, ...]:
    """Returns the slots of which a rank holds its shards alone, of a piece that is trained."""
    return ("weight", *piece.tensor.states) if layout.zero == 3 else tuple(piece.tensor.states)


def weight_key(piece: Piece) -> Owned:
    """Returns the key of a weight that is not sharded; a tied weight has the key of its original."""
    return Owned(piece.tensor.alias or piece.tensor.name, "weight", piece.box)


def run_key(slot: str, piece: Piece, flat: tuple[int, int]) -> Owned:
    """Returns the key of a range of a slot; a tied tensor has the key of its original."""
    return Owned(piece.tensor.alias or piece.tensor.name, slot, piece.box, flat)
