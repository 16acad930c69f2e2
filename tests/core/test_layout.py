"""Layouts as values: ranks, coordinates, stages of the pipeline."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given

from tk.core.errors import ParallelError
from tk.core.layout import Layout, stages
from tk.core.places import Coordinates
from tk.core.tensors import TensorSpec
from tk.tests.core.layouts import layouts
from tk.tests.example_counts import examples


def test_layers_go_to_pipeline_ranks_in_order_and_round_robin() -> None:
    table = tuple(TensorSpec(str(layer), (1,), None, layer) for layer in range(8))

    def place(layout: Layout) -> list[list[range]]:
        return [[stage.layers for stage in held] for held in stages(table, layout)]

    assert place(Layout(pp=2)) == [[range(4)], [range(4, 8)]]
    assert place(Layout(pp=3)) == [[range(2)], [range(2, 5)], [range(5, 8)]]
    assert place(Layout(pp=2, virtual_stages=2)) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    with pytest.raises(ParallelError, match="num_hidden_layers = 8"):
        place(Layout(pp=9))


def test_only_the_ends_of_the_pipeline_hold_tensors_outside_of_layers() -> None:
    first, last = TensorSpec("embed", (1,)), TensorSpec("head", (1,), layer="last")
    table = (first, *(TensorSpec(str(layer), (1,), None, layer) for layer in range(4)), last)
    layout = Layout(pp=2, virtual_stages=2)
    held = [[(s.holds(first), s.holds(last)) for s in stages] for stages in stages(table, layout)]
    assert held == [[(True, False), (False, False)], [(False, False), (False, True)]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": 0}, "tp = 0"),
        ({"zero": 4}, "zero stage = 4"),
        ({"dp": 4, "shard_size": 3}, "shard_size = 3 does not divide dp = 4; use a divisor of dp"),
        ({"cp": 0}, "cp = 0"),
        ({"ep": 0}, "ep = 0"),
        ({"dp": 3, "cp": 2, "shard_size": 4}, "shard_size = 4 does not divide dp x cp = 3 x 2 = 6; use a divisor"),
        ({"dp": 2, "cp": 3, "tp": 2, "ep": 5}, "ep x expert_tp = 5 x 1 does not divide the dp x cp x tp = 2 x 3 x 2"),
        ({"dp": 2, "expert_tp": 3}, "ep x expert_tp = 1 x 3 does not divide"),
        ({"dp": 2, "expert_tp": -1}, "ep x expert_tp = 1 x -1 does not divide"),
        ({"dp": 4, "shard_size": -2, "zero": 1}, "shard_size = -2 does not divide dp = 4"),
    ],
)
def test_impossible_layouts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        Layout(**wrong)


def test_ranks_run_over_tp_first_then_over_the_positions_of_a_row() -> None:
    layout = Layout(tp=2, dp=3, pp=2, cp=4)
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert at == [Coordinates(*place) for place in product(range(2), range(3), range(4), range(2))]
    assert [layout.rank(each) for each in at] == list(range(layout.world_size))
    places = [layout.dense.place(rank) for rank in range(layout.world_size)]
    assert [each.data for each in places] == [c.dp * 4 + c.cp for c in at], "the data ranks, dp x cp"


@examples(200)
@given(layouts())
def test_both_places_of_a_rank_name_it_and_no_other(layout: Layout) -> None:
    for spread in (layout.dense, layout.experts):
        assert spread.data * spread.ep * spread.tp == layout.stage_size
        assert spread.group_size * spread.num_copies == spread.data
        found = [spread.place(rank) for rank in range(layout.world_size)]
        assert found == found[: layout.stage_size] * layout.pp
        numbers = [(place.data * spread.ep + place.ep) * spread.tp + place.tp for place in found[: layout.stage_size]]
        assert numbers == list(range(layout.stage_size)), "a bijection, tp fastest"
        assert all(place.copy * spread.group_size + place.member == place.data for place in found)
    assert layout.dense.num_copies % layout.experts.num_copies == 0 or layout.zero == 0
    if layout.ep == 1 and not layout.expert_tp:
        assert layout.experts == layout.dense
    assert Layout(**layout.to_json()) == replace(layout, layer_buckets=False)


@pytest.mark.parametrize(
    ("layout", "group_size", "copies"),
    [
        (Layout(dp=8, ep=4, zero=1), 2, 1),  # all ranks share one copy
        (Layout(dp=8, ep=2, zero=1, shard_size=4), 2, 2),  # a group of 4 has two copies of each expert
        (Layout(dp=8, ep=4, zero=1, shard_size=4), 1, 2),  # a group of 4 has one copy of all experts
        (Layout(dp=8, ep=8, zero=1, shard_size=4), 1, 1),  # two groups have one
        (Layout(dp=6, ep=2, zero=1, shard_size=3), 3, 1),  # a group of 3 has one and a half
        (Layout(dp=4, tp=2, ep=4, zero=1, shard_size=2), 1, 2),  # ep exceeds the 2 data ranks of a group
        (Layout(dp=4, tp=2, expert_tp=1, zero=1, shard_size=2), 4, 2),
        (Layout(dp=8, ep=2), 1, 4),
    ],
    ids=str,
)
def test_experts_states_stay_within_a_zero_group_that_has_whole_copies_of_them(
    layout: Layout, group_size: int, copies: int
) -> None:
    experts = layout.experts
    assert (experts.group_size, experts.num_copies) == (group_size, copies)


def test_new_axes_stand_in_a_manifest_only_where_they_say_something() -> None:
    before = {"tp": 4, "pp": 1, "dp": 2, "virtual_stages": 1, "shard_size": 0, "zero": 0, "bucket_size": 2**24}
    assert Layout(tp=4, dp=2).to_json() == before | {"sharding": "flat"}
    assert Layout(tp=4, dp=2, expert_tp=4) == Layout(tp=4, dp=2)
    assert Layout(tp=4, dp=2, ep=8, expert_tp=1) == Layout(tp=4, dp=2, ep=8)
    assert Layout(tp=4, dp=2, cp=2, ep=2, expert_tp=4).to_json() == {
        **before,
        "sharding": "flat",
        "cp": 2,
        "ep": 2,
        "expert_tp": 4,
    }
