"""Ownership: which rank writes which elements of which slot of a tensor.

This module alone decides it; save plans, `tk reshard` and `tk plan` call it. Over all ranks, every logical element of
every slot has exactly one owner. Tensors that a checkpoint does not have (`TensorSpec.stored`) have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from .buckets import all_buckets, shards
from .geometry import Box
from .layout import Layout
from .local_params import Piece, local_params
from .places import RankPlace, Spread
from .tensors import Table

MIN_CUT_SIZE: Final = 2**18  # elements; one replica gets the whole of a smaller tensor (1 MiB of fp32)
Run = tuple[Piece, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Owned:
    """Elements that a rank saves.

    Attributes:
        tensor: the name of the logical tensor.
        slot: "weight" or a slot of the optimizer.
        box: the part of the tensor.
        flat: the range [a, b) of the box in row-major order; None = the whole box.
    """

    tensor: str
    slot: str
    box: Box
    flat: tuple[int, int] | None = None


def owned(table: Table, layout: Layout, rank: int) -> tuple[Owned, ...]:
    """Returns the elements of each slot of each tensor that a rank saves, slot after slot, weights first.

    Weights that several ranks hold are divided among them: as whole tensors if no tensor is cut (so that the folder is
    a valid Hugging Face one), in equal flat ranges otherwise. A rank saves sharded slots from its own shards, without
    a gather.
    """
    params = local_params(table, layout, rank)
    parts = all_buckets(params, layout)
    own = shards(parts, layout, rank)
    holdings = [
        _Holding(
            spread,
            spread.place(rank),
            [(p, (0, p.box.size)) for param in params if param.shared_by == name for p in param.pieces if p.owner],
            [(s.piece, s.flat) for s in own if parts[s.bucket].family.name == name and s.piece.owner],
        )
        for name, spread in layout.families.items()
    ]
    states = {id(spec.states): spec.states for spec in table}  # many tensors share one mapping
    cut = layout.tp > 1 or layout.experts.tp > 1
    return tuple(
        Owned(piece.tensor.name, slot, piece.box, None if flat == (0, piece.box.size) else flat)
        for slot in ("weight", *dict.fromkeys(chain.from_iterable(states.values())))
        for held in holdings
        for piece, flat in _saved(held, slot, layout.zero, cut)
        if piece.tensor.stored
    )


@dataclass(frozen=True, slots=True)
class _Holding:
    """The tensors of one family on a rank, of those that its place owns.

    Attributes:
        spread: how ranks hold the family.
        place: the rank's place among them.
        whole: all elements.
        sharded: those that the rank holds as a member of a ZeRO group; of trained tensors it updates these.
    """

    spread: Spread
    place: RankPlace
    whole: list[Run]
    sharded: list[Run]


def _saved(held: _Holding, slot: str, zero: int, cut: bool) -> list[Run]:
    """Returns the runs of a slot that the rank saves; `cut` says whether weights below stage 3 are cut."""
    spread, place = held.spread, held.place
    if slot == "weight" and zero < 3:
        runs = _deal(held.whole, spread.data, place.data, cut)
    elif zero == 0:
        runs = _deal(_with_slot(held.whole, slot), spread.data, place.data, cut=True)
    else:
        runs = _deal(_with_slot(held.sharded, slot), spread.num_copies, place.copy, cut=True)
        if slot == "weight":
            unsharded = [run for run in held.whole if not run[0].tensor.sharded]
            runs += _deal(unsharded, spread.data, place.data, cut=True)
    if slot == "weight" and place.data == 0:  # tensors without elements have no runs, but the checkpoint lists them
        runs += [run for run in held.whole if 0 in run[0].tensor.shape]
    return runs


def _with_slot(runs: Sequence[Run], slot: str) -> list[Run]:
    """Returns the runs of the tensors that have a slot."""
    return [run for run in runs if slot == "weight" or slot in run[0].tensor.states]


def _deal(runs: Sequence[Run], num_replicas: int, replica: int, cut: bool) -> list[Run]:
    """Returns the share of `replica`: a part of each large run, and those small runs that fall to it.

    Small runs go, largest first, to the replica with the fewest elements so far.
    """
    mine: list[Run] = []
    small: list[Run] = []
    for piece, (a, b) in runs:
        if cut and b - a >= MIN_CUT_SIZE and num_replicas > 1:
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
