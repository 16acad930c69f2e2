"""The ranges that several ranks hold, compared with a count over every single rank."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tk.core import replicas
from tk.core.buckets import buckets, frozen_buckets, shards
from tk.core.layout import Layout
from tk.core.local_params import LocalParam, local_params
from tk.core.ownership import Owned
from tk.core.replicas import any_replicated, replicated, shared_by_axis
from tk.core.tensors import Table, TensorSpec, with_slots
from tk.tests.checkpoint.saving import llama_table, mixed_table

SLOTS = {"weight": "F32", "exp_avg": "F32"}


def held(table: tuple[TensorSpec, ...], layout: Layout, rank: int) -> list[Owned]:
    """Returns every range on one rank, without the code under test."""
    params = local_params(table, layout, rank)
    runs = shards((*buckets(params, layout), *frozen_buckets(params, layout)), layout, rank)
    name = {spec.name: spec.alias or spec.name for spec in table}
    whole = [
        Owned(name[piece.tensor.name], "weight", piece.box)
        for param in params
        for piece in param.pieces
        if layout.zero < 3 or piece.tensor.buffer
    ]
    ranges = [
        Owned(name[run.piece.tensor.name], slot, run.piece.box, run.flat)
        for slot in SLOTS
        if slot != "weight" or layout.zero == 3
        for run in runs
        if slot == "weight" or run.piece.tensor.trainable
    ]
    return ranges + whole


LAYOUTS = [
    Layout(tp=4),
    Layout(dp=2),
    Layout(tp=2, dp=2, zero=1, bucket_size=500),
    Layout(tp=2, pp=2, dp=4, zero=2, shard_size=2, bucket_size=500),
    Layout(pp=2, dp=4, zero=3, shard_size=2, bucket_size=500),
    Layout(tp=4, dp=2, zero=3),
    Layout(tp=2, dp=4, zero=1, shard_size=2, sharding="dim0"),
    Layout(tp=2, dp=2, cp=2, zero=1, shard_size=2, bucket_size=500),
    Layout(pp=2, cp=2, zero=2),
    Layout(cp=2, ep=2),
    Layout(tp=4, expert_tp=1, zero=1),
    Layout(tp=4, ep=2, zero=2, bucket_size=500),
    Layout(tp=2, dp=2, cp=2, ep=2, expert_tp=2, zero=3, bucket_size=500),
    Layout(pp=2, dp=4, ep=2, zero=1, shard_size=2, bucket_size=500),
    Layout(tp=2, dp=4, ep=2, zero=3, shard_size=2, sharding="dim0"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_range_is_replicated_if_two_ranks_hold_it(layout: Layout) -> None:
    table = with_slots(mixed_table(), SLOTS)
    counts: Counter[Owned] = Counter()
    for rank in range(layout.world_size):
        counts.update(held(table, layout, rank))
    common = replicated(table, layout)
    assert len(set(common)) == len(common)
    assert set(common) == {item for item, count in counts.items() if count > 1}
    assert common, "a model always has tensors that are not split"


def test_a_single_rank_has_no_replicas() -> None:
    assert replicated(with_slots(llama_table(), SLOTS), Layout()) == ()


def neighbours(layout: Layout, rank: int) -> dict[str, dict[str, list[int]]]:
    """Returns the ranks of each axis of `rank` by family, found from the numbers of every rank."""
    sizes = {"dense": (layout.dp * layout.cp, 1, layout.tp)}
    if layout.ep > 1 or layout.expert_tp:
        expert_tp = layout.expert_tp or 1
        sizes["experts"] = (layout.stage_size // (layout.ep * expert_tp), layout.ep, expert_tp)
    return {
        name: _neighbours(layout, rank, (layout.pp, *axes), layout.families[name].group_size)
        for name, axes in sizes.items()
    }


def _neighbours(layout: Layout, rank: int, axes: tuple[int, ...], size: int) -> dict[str, list[int]]:
    numbers = [tuple(map(int, np.unravel_index(other, axes))) for other in range(layout.world_size)]
    pp, data, ep, tp = numbers[rank]

    def ranks(same: Callable[[int, int, int, int], bool]) -> list[int]:
        return [other for other, each in enumerate(numbers) if same(*each)]

    return {
        "shard": ranks(lambda p, d, e, t: (p, e, t, d // size) == (pp, ep, tp, data // size)),
        "replicate": ranks(lambda p, d, e, t: (p, e, t, d % size) == (pp, ep, tp, data % size)),
        "tp": ranks(lambda p, d, e, t: (p, d, e) == (pp, data, ep)),
        "embedding": ranks(lambda p, d, e, t: p in (0, layout.pp - 1) and (d, e, t) == (data, ep, tp)),
    }


def by_axis(table: Table, layout: Layout, rank: int) -> dict[tuple[str, str], tuple[Owned, ...]]:
    """Returns the ranges that a rank compares, by family and axis."""
    shared = shared_by_axis(table, layout, rank)
    found = {("dense", "embedding"): shared.embedding}
    for name, items in shared.families.items():
        found |= {(name, axis): getattr(items, axis) for axis in ("shard", "replicate", "tp")}
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", [None, "parameter", "buffer"])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(), Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_neighbours_that_agree_along_every_axis_make_the_world_agree(
    layout: Layout, frozen: str | None, tied: bool
) -> None:
    """Neighbours that compare a range connect all of its holders, and nothing else is compared.

    Neighbours have the same list, so that they call the same collectives.
    """
    specs = [
        replace(
            spec,
            trainable=not frozen or spec.name != "norm.weight",
            buffer=frozen == "buffer" and spec.name == "norm.weight",
            alias=spec.alias if tied else "",
        )
        for spec in mixed_table()
    ]
    table = with_slots(specs, SLOTS)
    holders: dict[Owned, set[int]] = {}
    for rank in range(layout.world_size):
        for item in held(table, layout, rank):
            holders.setdefault(item, set()).add(rank)
    common = {item: ranks for item, ranks in holders.items() if len(ranks) > 1}
    reached = {item: {rank: {rank} for rank in ranks} for item, ranks in common.items()}
    shared = [by_axis(table, layout, rank) for rank in range(layout.world_size)]
    for rank, items_of in enumerate(shared):
        groups = {(name, axis): ranks for name, of in neighbours(layout, rank).items() for axis, ranks in of.items()}
        for key, items in items_of.items():
            group = groups[key]
            assert len(set(items)) == len(items)
            if rank not in group:
                assert not items
                continue
            assert all(shared[other][key] == items for other in group)
            for item in items:
                together = set().union(*(reached[item][other] for other in group if other in common[item]))
                for other in together:
                    reached[item][other] = together
    for item, ranks in common.items():
        assert all(found == ranks for found in reached[item].values()), item
    assert any_replicated(table, layout) == bool(common)
    assert set(replicated(table, layout)) == set(common)


def test_the_share_of_a_rank_among_thousands_looks_at_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def counted(table: Table, layout: Layout, rank: int) -> tuple[LocalParam, ...]:
        looked_at.append(rank)
        return local_params(table, layout, rank)

    monkeypatch.setattr(replicas, "local_params", counted)
    layout = Layout(tp=4, pp=2, dp=1024, cp=2, zero=1)
    shared_by_axis(with_slots(llama_table(), SLOTS), layout, 12345)
    assert set(looked_at) == {12344, 12345, 12346, 12347, 12345 - 8192}, "its tp group, the other end of its pipeline"
    assert len(looked_at) <= 1 + layout.tp + 2
