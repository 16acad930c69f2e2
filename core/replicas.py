"""What several ranks hold the same values of: the ground on which replicas are compared."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .buckets import buckets, shards
from .layout import Coordinates, Layout
from .local_params import Piece, local_params
from .ownership import Owned
from .tensors import Table, num_holders


@dataclass(frozen=True, slots=True)
class Shared:
    """What one rank and its neighbours along a mesh axis hold in common, in an order that is the same on all of them.

    Whatever two ranks of the world hold, a chain of such neighbours connects: where all of them agree, all ranks do.

    Attributes:
        shard, replicate: held by every rank of the group.
        tp, ends: held by two or more ranks of it, perhaps not by this one.
    """

    shard: tuple[Owned, ...]
    replicate: tuple[Owned, ...]
    tp: tuple[Owned, ...]
    ends: tuple[Owned, ...]


def shared_by_axis(table: Table, layout: Layout, at: Coordinates, slots: Sequence[str]) -> Shared:
    """What the rank at `at` is to compare along each axis: its own share and its neighbours' alone are looked at."""
    member = at.dp % layout.group_size
    mine = _held(table, layout, at.pp, at.tp, member, slots)
    at_ends = layout.pp > 1 and at.pp in (0, layout.pp - 1) and any(spec.alias for spec in table)
    return Shared(
        shard=tuple(item for item in mine if item.slot == "weight" and item.flat is None)
        if layout.group_size > 1
        else (),
        replicate=tuple(mine) if layout.dp > layout.group_size else (),
        tp=_held_twice(_held(table, layout, at.pp, tp, member, slots) for tp in range(layout.tp))
        if layout.tp > 1
        else (),
        ends=_held_twice(_held(table, layout, pp, at.tp, member, slots) for pp in (0, layout.pp - 1))
        if at_ends
        else (),
    )


def any_replicated(table: Table, layout: Layout) -> bool:
    """Whether two ranks of the world hold anything in common; the same on every rank."""
    frozen = any(not spec.trainable for spec in table)
    over_tp = any(spec.split is None or num_holders(spec, layout.tp) > 1 for spec in table)
    tied = any(spec.alias for spec in table)
    return (
        layout.dp > layout.group_size
        or (layout.dp > 1 and (layout.zero < 3 or frozen))
        or (layout.tp > 1 and over_tp)
        or (layout.pp > 1 and tied)
    )


def replicated(table: Table, layout: Layout, slots: Sequence[str]) -> tuple[Owned, ...]:
    """Every run of a slot that two or more ranks of the world hold, in an order that is the same on all of them.

    Weights are held by all of dp (below ZeRO stage 3), other slots by the replicas of an optimizer shard; either also
    by tensor-parallel ranks that share a tensor, and by both ends of a pipeline where embeddings are tied. The whole
    world is walked: seconds for thousands of ranks.
    """
    holders: Counter[Owned] = Counter()
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for member in range(layout.group_size):
                for item in _held(table, layout, pp, tp, member, slots):
                    holders[item] += layout.dp // layout.group_size
    return tuple(item for item, count in holders.items() if count > 1)


def _held(table: Table, layout: Layout, pp: int, tp: int, member: int, slots: Sequence[str]) -> list[Owned]:
    """Everything that one rank holds, by the keys below; `member` is its place in its shard group."""
    params = local_params(table, layout, pp, tp)
    found = []
    if "weight" in slots:
        pieces = [piece for param in params for piece in param.pieces]
        found += [weight_held(piece) for piece in pieces if layout.zero < 3 or not piece.tensor.trainable]
    runs = shards(buckets(params, layout), layout.group_size, member)
    for slot in slots:
        if slot != "weight" or layout.zero == 3:
            found += [run_held(slot, run.piece, run.flat) for run in runs]
    return found


def _held_twice(ranks: Iterable[list[Owned]]) -> tuple[Owned, ...]:
    counts = Counter(item for held in ranks for item in held)
    return tuple(item for item, count in counts.items() if count > 1)


def weight_held(piece: Piece) -> Owned:
    """The key of a weight that is held whole; a tied one has that of its original."""
    return Owned(piece.tensor.alias or piece.tensor.name, "weight", piece.box)


def run_held(slot: str, piece: Piece, flat: tuple[int, int]) -> Owned:
    """The key of a range of a slot."""
    return Owned(piece.tensor.alias or piece.tensor.name, slot, piece.box, flat)
