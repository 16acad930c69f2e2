"""Replicated values: which ranges of which tensors several ranks hold, so that their copies can be compared."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .buckets import all_buckets, shards
from .layout import Layout
from .local_params import Piece, local_params
from .ownership import Owned
from .places import Spread
from .tensors import Table, TensorSpec, num_holders


@dataclass(frozen=True, slots=True)
class SharedInFamily:
    """The ranges of one family to compare along each axis of its ranks, in an order that is the same on all of an axis.

    Attributes:
        shard: ranges that every rank of the shard group holds.
        replicate: ranges that every rank of the replicate group holds.
        tp: ranges that two or more ranks of the tp group hold, perhaps not this one.
    """

    shard: tuple[Owned, ...]
    replicate: tuple[Owned, ...]
    tp: tuple[Owned, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """The ranges to compare along each axis of one rank.

    A chain of neighbours connects any two ranks that hold the same range. So if all neighbours agree, all ranks agree.

    Attributes:
        families: by the name of a family (see `TensorFamily`), the ranges of its tensors.
        embedding: ranges that the first and the last pipeline rank both hold (tied embeddings), in an order that is
            the same on both.
    """

    families: Mapping[str, SharedInFamily]
    embedding: tuple[Owned, ...]


def shared_by_axis(table: Table, layout: Layout, rank: int) -> Shared:
    """Returns the ranges that a rank compares along each axis.

    The function looks at the shares of this rank and its neighbours only, so its time does not grow with the world.
    """
    stage, number = divmod(rank, layout.stage_size)
    last = layout.pp - 1
    at_ends = last > 0 and stage in (0, last) and any(spec.alias for spec in table)
    ends = (number, last * layout.stage_size + number)
    return Shared(
        families={
            name: _shared_in_family(table, layout, rank, name, spread) for name, spread in layout.families.items()
        },
        embedding=_held_twice(_held(table, layout, end, "dense") for end in ends) if at_ends else (),
    )


def _shared_in_family(table: Table, layout: Layout, rank: int, name: str, spread: Spread) -> SharedInFamily:
    mine = _held(table, layout, rank, name)
    first = rank - spread.place(rank).tp
    tp_ranks = range(first, first + spread.tp)
    return SharedInFamily(
        shard=tuple(item for item in mine if item.slot == "weight" and item.flat is None)
        if spread.group_size > 1
        else (),
        replicate=tuple(mine) if spread.num_copies > 1 else (),
        tp=_held_twice(_held(table, layout, each, name) for each in tp_ranks) if spread.tp > 1 else (),
    )


def any_replicated(table: Table, layout: Layout) -> bool:
    """Returns whether any two ranks hold the same range; the answer is the same on every rank."""
    families = layout.families
    specs = {name: [spec for spec in table if _is_of(spec, name, families)] for name in families}
    tied = any(spec.alias for spec in table)
    return (layout.pp > 1 and tied) or any(
        _any_replicated(specs[name], spread, layout.zero) for name, spread in families.items()
    )


def _is_of(spec: TensorSpec, family: str, families: Collection[str]) -> bool:
    return len(families) == 1 or (spec.expert is not None) == (family == "experts")


def _any_replicated(family: Table, spread: Spread, zero: int) -> bool:
    """Returns whether any two ranks hold the same range of a tensor of one family."""
    whole = zero < 3 or any(not spec.sharded for spec in family)
    over_tp = any(spec.split is None or num_holders(spec, spread.tp) > 1 for spec in family)
    return bool(family) and (spread.num_copies > 1 or (spread.data > 1 and whole) or (spread.tp > 1 and over_tp))


def replicated(table: Table, layout: Layout) -> tuple[Owned, ...]:
    """Returns every range of a slot that two or more ranks hold, in an order that is the same on all ranks.

    Below ZeRO stage 3 all data ranks hold the same weights. The copies of an optimizer shard have the same other slots.
    Tensor-parallel ranks may share a tensor, and with tied embeddings the first and the last pipeline rank do. The
    function visits all ranks that hold different ranges: it takes seconds for thousands of them.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        places = [spread.place(rank) for spread in layout.families.values()]
        holding = [number for place in places for number in (place.ep, place.tp, place.member)]
        alike.setdefault((rank // layout.stage_size, *holding), []).append(rank)
    holders: Counter[Owned] = Counter()
    for ranks in alike.values():
        for name in layout.families:
            for item in _held(table, layout, ranks[0], name):
                holders[item] += len(ranks)
    return tuple(item for item, count in holders.items() if count > 1)


def _held(table: Table, layout: Layout, rank: int, family: str) -> list[Owned]:
    """Returns the keys of all ranges of one family that a rank holds."""
    params = local_params(table, layout, rank)
    pieces = [piece for param in params if param.shared_by == family for piece in param.pieces]
    found = [weight_key(piece) for piece in pieces if layout.zero < 3 or not piece.tensor.sharded]
    parts = all_buckets(params, layout)
    runs = [run for run in shards(parts, layout, rank) if parts[run.bucket].family.name == family]
    return found + [run_key(slot, run.piece, run.flat) for run in runs for slot in sharded_slots(run.piece, layout)]


def _held_twice(ranks: Iterable[list[Owned]]) -> tuple[Owned, ...]:
    counts = Counter(item for held in ranks for item in held)
    return tuple(item for item, count in counts.items() if count > 1)


def sharded_slots(piece: Piece, layout: Layout) -> tuple[str, ...]:
    """Returns the slots of which a rank holds its shards alone, of a piece that ranks share."""
    return ("weight", *piece.tensor.states) if layout.zero == 3 else tuple(piece.tensor.states)


def weight_key(piece: Piece) -> Owned:
    """Returns the key of a weight that is not sharded; a tied weight has the key of its original."""
    return Owned(piece.tensor.alias or piece.tensor.name, "weight", piece.box)


def run_key(slot: str, piece: Piece, flat: tuple[int, int]) -> Owned:
    """Returns the key of a range of a slot; a tied tensor has the key of its original."""
    return Owned(piece.tensor.alias or piece.tensor.name, slot, piece.box, flat)
