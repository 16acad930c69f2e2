"""The parameters of one position, and the boxes in them."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given

from tk.core.errors import ParallelError
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.local_params import LocalParam, local_params, params_of_ranks
from tk.core.tensors import Split, TensorSpec, num_experts, split_boxes
from tk.tests.core.layouts import HEAD, layouts, tables
from tk.tests.example_counts import examples


@examples(40)
@given(tables(), layouts())
def test_a_position_holds_its_pieces(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    experts = num_experts(table) // layout.ep
    for rank in range(layout.world_size):
        place = layout.experts.place(rank)
        for param in local_params(table, layout, rank):
            assert sum(piece.box.size for piece in param.pieces) <= param.size
            starts = np.cumsum([0, *(piece.box.size for piece in param.pieces)])
            assert [piece.start for piece in param.pieces] == starts[:-1].tolist()
            for piece in param.pieces:
                if piece.tensor.expert is None:
                    assert piece.box in split_boxes(piece.tensor, layout.tp, layout.coordinates(rank).tp)
                else:
                    assert piece.box in split_boxes(piece.tensor, layout.experts.tp, place.tp)
                    assert piece.tensor.expert // experts == place.ep
                assert piece.box.shape[1:] == param.shape[1:]


@examples(40)
@given(tables(), layouts())
def test_ranks_of_one_place_hold_the_same(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    """So those that share buckets lay them out alike. Experts are another family only if other ranks hold them."""
    found: dict[tuple[str, int, int, int], list[LocalParam]] = {}
    for rank in range(layout.world_size):
        params = local_params(table, layout, rank)
        assert {param.shared_by for param in params} <= set(layout.families)
        for name, spread in layout.families.items():
            place = spread.place(rank)
            mine = [param for param in params if param.shared_by == name]
            key = (name, rank // layout.stage_size, place.ep, place.tp)
            assert found.setdefault(key, mine) == mine


def test_the_number_of_experts_is_a_multiple_of_ep() -> None:
    table = [TensorSpec(f"{expert}.up", (4, 4), Split(0), 0, "up", expert=expert) for expert in range(6)]
    held = [local_params(table, Layout(dp=3, ep=3), rank) for rank in range(3)]
    assert [[p.tensor.name for p in param.pieces] for (param,) in held] == [
        ["0.up", "1.up"],
        ["2.up", "3.up"],
        ["4.up", "5.up"],
    ]
    assert held[0][0].shape == (8, 4)
    with pytest.raises(
        ParallelError, match=r"num_experts % ep = 6 % 4 = 2, and it must be 0.*Use a divisor of 6 as ep"
    ):
        local_params(table, Layout(dp=4, ep=4), 0)


class CountedTable(tuple[TensorSpec, ...]):
    """A table that counts how often it is looked through."""

    looks = 0

    def __iter__(self) -> Iterator[TensorSpec]:
        type(self).looks += 1
        return super().__iter__()


def test_a_table_is_looked_through_as_often_for_many_ranks_as_for_one() -> None:
    """A plan makes the parameters of one rank of each pipeline stage, of 100,000 tensors."""
    table = CountedTable(TensorSpec(str(layer), (4, 4), None, layer) for layer in range(64))
    layout, looks = Layout(tp=2, pp=64), []
    for ranks in (range(1), range(0, 128, 2)):
        CountedTable.looks = 0
        found = list(params_of_ranks(table, layout, ranks))
        looks.append(CountedTable.looks)
        assert found == [local_params(table, layout, rank) for rank in ranks]
    assert looks == [4, 4]


def test_replicated_heads_are_owned_by_the_lowest_rank() -> None:
    spec = TensorSpec("k", (2 * HEAD, 8), Split(0, HEAD, "replicate"), 0)
    assert [split_boxes(spec, 4, rank)[0].offset[0] for rank in range(4)] == [0, 0, HEAD, HEAD]
    owners = [piece.owner for rank in range(4) for p in local_params((spec,), Layout(tp=4), rank) for piece in p.pieces]
    assert owners == [True, False, True, False]


def test_parts_of_one_parameter_are_frozen_together() -> None:
    query = TensorSpec("q", (4, 2), Split(0), 0, "qkv", trainable=False)
    with pytest.raises(ParallelError, match="The module fuses q, k into one parameter, qkv: freeze all"):
        local_params((query, TensorSpec("k", (4, 2), Split(0), 0, "qkv")), Layout(), 0)


def test_sections_are_cut_each_by_itself_and_stay_whole_at_tp_1() -> None:
    spec = TensorSpec("c_attn", (6, 3 * 2 * HEAD), Split(1, HEAD, sections=3), 0)
    (param,) = local_params((spec,), Layout(tp=2), 1)
    assert [piece.box.bounds()[1] for piece in param.pieces] == [[4, 8], [12, 16], [20, 24]]
    assert param.shape == (3 * 6, HEAD)
    assert local_params((spec,), Layout(), 0)[0].shape == spec.shape


def test_padded_rows_have_no_owner() -> None:
    spec = TensorSpec("embed", (5, 2), Split(0, rule="pad"))
    assert [split_boxes(spec, 4, rank)[0].bounds()[0] for rank in range(4)] == [[0, 2], [2, 4], [4, 5], [5, 5]]
    assert {local_params((spec,), Layout(tp=4), rank)[0].shape for rank in range(4)} == {(2, 2)}


def test_columns_of_a_fused_tensor_are_one_box_of_each_section() -> None:
    spec = TensorSpec("c_attn", (6, 24), Split(1, HEAD, sections=3), 0)
    assert split_boxes(spec, 1, 0) == (Box.whole(spec.shape),)
    assert [box.bounds()[1] for box in split_boxes(spec, 2, 1)] == [[4, 8], [12, 16], [20, 24]]
    (param,) = local_params((spec,), Layout(tp=2), 1)
    assert param.shape == (18, 4)
