"""Layouts as values: ranks, coordinates, stages of the pipeline."""

from typing import Any

import pytest

from tk.core.errors import ParallelError
from tk.core.layout import Layout, stages
from tk.core.tensors import TensorSpec


def test_layers_go_to_pipeline_ranks_in_order_and_round_robin() -> None:
    table = tuple(TensorSpec(str(layer), (1,), None, layer) for layer in range(8))

    def place(layout: Layout) -> list[list[range]]:
        return [[stage.layers for stage in stages(table, layout, pp)] for pp in range(layout.pp)]

    assert place(Layout(pp=2)) == [[range(4)], [range(4, 8)]]
    assert place(Layout(pp=3)) == [[range(2)], [range(2, 5)], [range(5, 8)]]
    assert place(Layout(pp=2, virtual_stages=2)) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    with pytest.raises(ParallelError, match="num_hidden_layers = 8"):
        place(Layout(pp=9))


def test_only_the_ends_of_the_pipeline_hold_tensors_outside_of_layers() -> None:
    first, last = TensorSpec("embed", (1,)), TensorSpec("head", (1,), layer="last")
    table = (first, *(TensorSpec(str(layer), (1,), None, layer) for layer in range(4)), last)
    layout = Layout(pp=2, virtual_stages=2)
    held = [[(s.holds(first), s.holds(last)) for s in stages(table, layout, pp)] for pp in range(2)]
    assert held == [[(True, False), (False, False)], [(False, False), (False, True)]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": 0}, "tp = 0"),
        ({"zero": 4}, "zero stage = 4"),
        ({"dp": 4, "shard_size": 3}, "shard_size = 3 does not divide dp = 4; use a divisor of dp"),
        ({"dp": 4, "shard_size": -2, "zero": 1}, "shard_size = -2 does not divide dp = 4"),
    ],
)
def test_impossible_layouts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        Layout(**wrong)


def test_ranks_run_over_tp_first() -> None:
    layout = Layout(tp=2, dp=3, pp=2)
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [(c.pp, c.dp, c.tp) for c in at] == [(p, d, t) for p in range(2) for d in range(3) for t in range(2)]
    assert Layout(**layout.to_json()) == layout
