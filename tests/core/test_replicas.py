"""What ranks hold in common, against counting what every single rank holds."""

from collections import Counter

import pytest

from tk.core.buckets import buckets, shards
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.ownership import Owned
from tk.core.replicas import replicated
from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.saving import llama_table

SLOTS = ("weight", "exp_avg")


def held(table: tuple[TensorSpec, ...], layout: Layout, rank: int) -> list[Owned]:
    """Everything on one rank, found the long way."""
    at = layout.coordinates(rank)
    params = local_params(table, layout, at.pp, at.tp)
    member = at.dp % layout.group_size
    runs = shards(buckets(params, layout), layout.group_size, member)
    name = {spec.name: spec.alias or spec.name for spec in table}
    whole = [Owned(name[piece.tensor.name], "weight", piece.box) for param in params for piece in param.pieces]
    ranges = [
        Owned(name[run.piece.tensor.name], slot, run.piece.box, run.flat)
        for slot in SLOTS
        if slot != "weight" or layout.zero == 3
        for run in runs
    ]
    return ranges + (whole if layout.zero < 3 else [])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4),
        Layout(dp=2),
        Layout(tp=2, dp=2, zero=1, bucket_size=500),
        Layout(tp=2, pp=2, dp=4, zero=2, shard_size=2, bucket_size=500),
        Layout(pp=2, dp=4, zero=3, shard_size=2, bucket_size=500),
        Layout(tp=4, dp=2, zero=3),
    ],
    ids=str,
)
def test_it_is_what_two_ranks_hold(layout: Layout) -> None:
    table = llama_table()
    counts: Counter[Owned] = Counter()
    for rank in range(layout.world_size):
        counts.update(held(table, layout, rank))
    common = replicated(table, layout, SLOTS)
    assert len(set(common)) == len(common)
    assert set(common) == {item for item, count in counts.items() if count > 1}
    assert common, "a model always has tensors that are not split"


def test_one_rank_has_nothing_in_common_with_anybody() -> None:
    assert replicated(llama_table(), Layout(), SLOTS) == ()
