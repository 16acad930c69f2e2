"""The ranges that several ranks hold, compared with a count over every single rank."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tk.core import replicas
from tk.core.buckets import buckets, shards
from tk.core.layout import Layout
from tk.core.local_params import LocalParam, local_params
from tk.core.ownership import Owned
from tk.core.places import Coordinates
from tk.core.replicas import any_replicated, replicated, shared_by_axis
from tk.core.tensors import Table, TensorSpec, with_slots
from tk.tests.checkpoint.saving import llama_table

SLOTS = {"weight": "F32", "exp_avg": "F32"}


def held(table: tuple[TensorSpec, ...], layout: Layout, rank: int) -> list[Owned]:
    """Returns every range on one rank, without the code under test."""
    at = layout.coordinates(rank)
    params = local_params(table, layout, at.pp, at.tp)
    member = (at.dp * layout.cp + at.cp) % layout.group_size
    runs = shards(buckets(params, layout), layout.group_size, member, layout.sharding)
    name = {spec.name: spec.alias or spec.name for spec in table}
    whole = [
        Owned(name[piece.tensor.name], "weight", piece.box)
        for param in params
        for piece in param.pieces
        if layout.zero < 3 or not piece.tensor.trainable
    ]
    ranges = [
        Owned(name[run.piece.tensor.name], slot, run.piece.box, run.flat)
        for slot in SLOTS
        if slot != "weight" or layout.zero == 3
        for run in runs
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
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_range_is_replicated_if_two_ranks_hold_it(layout: Layout) -> None:
    table = with_slots(llama_table(), SLOTS)
    counts: Counter[Owned] = Counter()
    for rank in range(layout.world_size):
        counts.update(held(table, layout, rank))
    common = replicated(table, layout)
    assert len(set(common)) == len(common)
    assert set(common) == {item for item, count in counts.items() if count > 1}
    assert common, "a model always has tensors that are not split"


def test_a_single_rank_has_no_replicas() -> None:
    assert replicated(with_slots(llama_table(), SLOTS), Layout()) == ()


def neighbours(layout: Layout, rank: int) -> dict[str, list[int]]:
    """Returns the ranks of each mesh axis of `rank`, found from the coordinates of every rank."""
    me, size = layout.coordinates(rank), layout.group_size

    def data(at: Coordinates) -> int:
        return at.dp * layout.cp + at.cp

    def ranks(same: Callable[[Coordinates], bool]) -> list[int]:
        return [other for other in range(layout.world_size) if same(layout.coordinates(other))]

    return {
        "shard": ranks(lambda at: (at.pp, at.tp, data(at) // size) == (me.pp, me.tp, data(me) // size)),
        "replicate": ranks(lambda at: (at.pp, at.tp, data(at) % size) == (me.pp, me.tp, data(me) % size)),
        "tp": ranks(lambda at: (at.pp, data(at)) == (me.pp, data(me))),
        "embedding": ranks(lambda at: at.pp in (0, layout.pp - 1) and (at.tp, data(at)) == (me.tp, data(me))),
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(), Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_neighbours_that_agree_along_every_axis_make_the_world_agree(layout: Layout, frozen: bool, tied: bool) -> None:
    """Neighbours that compare a range connect all of its holders, and nothing else is compared.

    Neighbours have the same list, so that they call the same collectives.
    """
    specs = [
        replace(spec, trainable=not (frozen and spec.name == "model.norm.weight"), alias=spec.alias if tied else "")
        for spec in llama_table()
    ]
    table = with_slots(specs, SLOTS)
    holders: dict[Owned, set[int]] = {}
    for rank in range(layout.world_size):
        for item in held(table, layout, rank):
            holders.setdefault(item, set()).add(rank)
    common = {item: ranks for item, ranks in holders.items() if len(ranks) > 1}
    reached = {item: {rank: {rank} for rank in ranks} for item, ranks in common.items()}
    shared = [shared_by_axis(table, layout, layout.coordinates(rank)) for rank in range(layout.world_size)]
    for rank in range(layout.world_size):
        for axis, group in neighbours(layout, rank).items():
            items = getattr(shared[rank], axis)
            assert len(set(items)) == len(items)
            if rank not in group:
                assert not items
                continue
            assert all(getattr(shared[other], axis) == items for other in group)
            for item in items:
                together = set().union(*(reached[item][other] for other in group if other in common[item]))
                for other in together:
                    reached[item][other] = together
    for item, ranks in common.items():
        assert all(found == ranks for found in reached[item].values()), item
    assert any_replicated(table, layout) == bool(common)
    assert set(replicated(table, layout)) == set(common)


def test_the_share_of_a_rank_among_thousands_looks_at_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[int, int]] = []

    def counted(table: Table, layout: Layout, pp: int, tp: int) -> tuple[LocalParam, ...]:
        looked_at.append((pp, tp))
        return local_params(table, layout, pp, tp)

    monkeypatch.setattr(replicas, "local_params", counted)
    layout = Layout(tp=4, pp=2, dp=2048, zero=1)
    shared_by_axis(with_slots(llama_table(), SLOTS), layout, layout.coordinates(12345))
    assert set(looked_at) == {(1, 0), (1, 1), (1, 2), (1, 3), (0, 1)}, "its tp group, and the other end of its pipeline"
    assert len(looked_at) <= 1 + layout.tp + 2
