"""Who owns what: over any table and layout, every element of every slot has one owner, and the load is even."""

import math
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tk.core.errors import ParallelError
from tk.core.geometry import Box, covers_exactly, flat_to_boxes
from tk.core.layout import Layout, Owned, buckets, local_params, owned, shards, stages
from tk.core.tensors import Split, TensorSpec, split_boxes

HEAD = 4
SLOTS = ("weight", "master", "exp_avg")


@st.composite
def tables(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    """Models with fused, padded, replicated, column-split and tied tensors."""
    hidden, heads = draw(st.sampled_from([(16, 4), (32, 8), (12, 4)]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    inner, vocab = draw(st.sampled_from([8, 24])), draw(st.integers(5, 70))
    tied = draw(st.booleans())
    query, kv = Split(0, HEAD, of="num_attention_heads"), Split(0, HEAD, "replicate", "num_key_value_heads")
    specs = [TensorSpec("embed", (vocab, hidden), Split(0, rule="pad"))]
    for layer in range(draw(st.integers(4, 6))):
        specs += [
            TensorSpec(f"{layer}.norm", (hidden,), None, layer),
            TensorSpec(f"{layer}.q", (heads * HEAD, hidden), query, layer, f"{layer}.qkv"),
            TensorSpec(f"{layer}.k", (kv_heads * HEAD, hidden), kv, layer, f"{layer}.qkv"),
            TensorSpec(f"{layer}.v", (kv_heads * HEAD, hidden), kv, layer, f"{layer}.qkv"),
            TensorSpec(f"{layer}.o", (hidden, heads * HEAD), Split(1, HEAD), layer),
            TensorSpec(f"{layer}.bias", (inner,), Split(0), layer),
            TensorSpec(f"{layer}.down", (hidden, inner), Split(1), layer),
            TensorSpec(f"{layer}.fused", (hidden, 3 * heads * HEAD), Split(1, HEAD, sections=3), layer),
            TensorSpec(f"{layer}.fused.bias", (3 * heads * HEAD,), Split(0, HEAD, sections=3), layer),
        ]
    specs.append(TensorSpec("head", (vocab, hidden), Split(0, rule="pad"), "last", alias="embed" if tied else ""))
    frozen = draw(st.sets(st.sampled_from(sorted({spec.param or spec.name for spec in specs})), max_size=3))
    return tuple(replace(spec, trainable=(spec.param or spec.name) not in frozen) for spec in specs)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp = draw(st.sampled_from([1, 2, 3, 4]))
    return Layout(
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.sampled_from([1, 2])),
        dp=dp,
        virtual_stages=draw(st.sampled_from([1, 2])),
        shard_size=draw(st.sampled_from([0, *(n for n in range(1, dp + 1) if dp % n == 0)])),
        zero=draw(st.integers(0, 3)),
        bucket_size=draw(st.sampled_from([64, 1000, 2**24])),
        sharding=draw(st.sampled_from(["flat", "dim0"])),
    )


def _slots(spec: TensorSpec) -> tuple[str, ...]:
    return SLOTS if spec.trainable else SLOTS[:1]


def boxes_of(item: Owned) -> list[Box]:
    return list(flat_to_boxes(item.box, *(item.flat or (0, item.box.size))))


@settings(max_examples=60, deadline=None)
@given(tables(), layouts())
def test_every_element_of_every_slot_has_one_owner(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    items = [item for rank in range(layout.world_size) for item in owned(table, layout, rank, SLOTS)]
    found: dict[tuple[str, str], list[Box]] = {}
    for item in items:
        found.setdefault((item.tensor, item.slot), []).extend(boxes_of(item))
    stored = [spec for spec in table if not spec.alias]
    assert set(found) == {(spec.name, slot) for spec in stored for slot in _slots(spec)}
    for spec in stored:
        for slot in _slots(spec):
            assert covers_exactly(found[spec.name, slot], Box.whole(spec.shape)), (spec.name, slot)


@settings(max_examples=40, deadline=None)
@given(tables(), layouts())
def test_the_shards_of_a_group_hold_its_parameters_once(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    params = local_params(table, layout, 0, layout.tp - 1)
    flat = buckets(params, layout)
    for bucket in flat:
        assert bucket.size % layout.group_size == 0
        assert all(a + p.size <= b for a, b, p in zip(bucket.offsets, bucket.offsets[1:], bucket.params, strict=False))
        decayed = [param.decay for param in bucket.params]
        assert decayed == sorted(decayed, reverse=True)
        assert bucket.num_decay == sum(param.size for param in bucket.params if param.decay)
        assert len({(param.stage, param.tied) for param in bucket.params}) == 1
        if layout.zero == 3:
            assert len({param.unit for param in bucket.params}) == 1
    runs = sorted(
        ((s.piece.tensor.name, s.piece.start), *s.flat)
        for rank in range(layout.group_size)
        for s in shards(flat, layout.group_size, rank, layout.sharding)
    )
    sizes = {
        (piece.tensor.name, piece.start): piece.box.size
        for param in params
        for piece in param.pieces
        if param.trainable
    }
    assert {key[0] for key, _ in groupby(runs, key=lambda run: run[0])} <= {name for name, _ in sizes}
    for key, of_piece in groupby(runs, key=lambda run: run[0]):
        edges = [edge for _, a, b in of_piece for edge in (a, b)]
        assert edges[0] == 0
        assert edges[-1] == sizes[key]
        assert edges[1:-1:2] == edges[2::2]


@settings(max_examples=40, deadline=None)
@given(tables(), layouts())
def test_a_position_holds_what_its_pieces_say(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for param in local_params(table, layout, pp, tp):
                assert sum(piece.box.size for piece in param.pieces) <= param.size
                starts = np.cumsum([0, *(piece.box.size for piece in param.pieces)])
                assert [piece.start for piece in param.pieces] == starts[:-1].tolist()
                for piece in param.pieces:
                    assert piece.box in split_boxes(piece.tensor, layout.tp, tp)
                    assert piece.box.shape[1:] == param.shape[1:]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_write_equal_parts(tp: int, zero: int) -> None:
    """Cut tensors: within 5 percent; whole ones at tp = 1: within the largest of them."""
    hidden = 1024
    table = tuple(
        spec
        for layer in range(4)
        for spec in (
            TensorSpec(f"{layer}.up", (4 * hidden, hidden), Split(0), layer),
            TensorSpec(f"{layer}.down", (hidden, 4 * hidden), Split(1), layer),
            TensorSpec(f"{layer}.norm", (hidden,), None, layer),
        )
    )
    layout = Layout(tp=tp, dp=4, zero=zero)
    for slot in ("weight", "exp_avg"):
        for group in range(tp):
            loads = [
                sum(math.prod(box.shape) for item in owned(table, layout, rank, (slot,)) for box in boxes_of(item))
                for rank in range(layout.world_size)
                if layout.coordinates(rank).tp == group
            ]
            if tp == 1 and slot == "weight":
                assert max(loads) - min(loads) <= 4 * hidden * hidden
            else:
                assert max(loads) <= 1.05 * min(loads)


def test_weights_are_whole_tensors_at_tp_1() -> None:
    table = (TensorSpec("a", (2048, 1024), Split(0)), TensorSpec("b", (2048, 1024), Split(1)))
    for zero in (0, 1, 2):
        items = [item for rank in range(3) for item in owned(table, Layout(dp=3, zero=zero), rank)]
        assert sorted((item.tensor, item.flat) for item in items) == [("a", None), ("b", None)]


def test_replicated_heads_are_owned_by_the_lowest_rank() -> None:
    spec = TensorSpec("k", (2 * HEAD, 8), Split(0, HEAD, "replicate"), 0)
    assert [split_boxes(spec, 4, rank)[0].offset[0] for rank in range(4)] == [0, 0, HEAD, HEAD]
    owners = [
        piece.owner for rank in range(4) for p in local_params((spec,), Layout(tp=4), 0, rank) for piece in p.pieces
    ]
    assert owners == [True, False, True, False]


def test_parts_of_one_parameter_are_frozen_together() -> None:
    query = TensorSpec("q", (4, 2), Split(0), 0, "qkv", trainable=False)
    with pytest.raises(ParallelError, match="q, k are one parameter, qkv: freeze all of them or none"):
        local_params((query, TensorSpec("k", (4, 2), Split(0), 0, "qkv")), Layout(), 0, 0)


def test_sections_are_cut_each_by_itself_and_stay_whole_at_tp_1() -> None:
    spec = TensorSpec("c_attn", (6, 3 * 2 * HEAD), Split(1, HEAD, sections=3), 0)
    (param,) = local_params((spec,), Layout(tp=2), 0, 1)
    assert [piece.box.bounds()[1] for piece in param.pieces] == [[4, 8], [12, 16], [20, 24]]
    assert param.shape == (3 * 6, HEAD)
    assert local_params((spec,), Layout(), 0, 0)[0].shape == spec.shape


def test_a_tp_that_does_not_fit_is_refused_with_those_that_do() -> None:
    spec = TensorSpec("q", (6 * HEAD, 8), Split(0, HEAD, of="num_attention_heads"))
    with pytest.raises(ParallelError, match=r"num_attention_heads % tp = 6 % 4 = 2.*Use tp = 1 or 2 or 3 or 6"):
        split_boxes(spec, 4, 0)
    with pytest.raises(ParallelError, match="tp = 4 does not fit"):
        split_boxes(TensorSpec("k", (3 * HEAD, 8), Split(0, HEAD, "replicate")), 4, 0)


def test_padded_rows_belong_to_nobody() -> None:
    spec = TensorSpec("embed", (5, 2), Split(0, rule="pad"))
    assert [split_boxes(spec, 4, rank)[0].bounds()[0] for rank in range(4)] == [[0, 2], [2, 4], [4, 5], [5, 5]]
    assert {local_params((spec,), Layout(tp=4), 0, rank)[0].shape for rank in range(4)} == {(2, 2)}


def test_layers_go_to_pipeline_ranks_in_order_and_round_robin() -> None:
    table = tuple(TensorSpec(str(layer), (1,), None, layer) for layer in range(8))

    def place(layout: Layout) -> list[list[range]]:
        return [[stage.layers for stage in stages(table, layout, pp)] for pp in range(layout.pp)]

    assert place(Layout(pp=2)) == [[range(4)], [range(4, 8)]]
    assert place(Layout(pp=3)) == [[range(2)], [range(2, 5)], [range(5, 8)]]
    assert place(Layout(pp=2, virtual_stages=2)) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    with pytest.raises(ParallelError, match="num_hidden_layers = 8"):
        place(Layout(pp=9))


def test_only_the_ends_of_the_pipeline_hold_what_no_layer_does() -> None:
    first, last = TensorSpec("embed", (1,)), TensorSpec("head", (1,), layer="last")
    table = (first, *(TensorSpec(str(layer), (1,), None, layer) for layer in range(4)), last)
    layout = Layout(pp=2, virtual_stages=2)
    held = [[(s.holds(first), s.holds(last)) for s in stages(table, layout, pp)] for pp in range(2)]
    assert held == [[(True, False), (False, False)], [(False, False), (False, True)]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"tp": 0}, "tp = 0"), ({"zero": 4}, "zero stage = 4"), ({"dp": 4, "shard_size": 3}, "use a divisor of dp")],
)
def test_impossible_layouts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        Layout(**wrong)


def test_ranks_run_over_tp_first() -> None:
    layout = Layout(tp=2, dp=3, pp=2)
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [(c.pp, c.dp, c.tp) for c in at] == [(p, d, t) for p in range(2) for d in range(3) for t in range(2)]
    assert Layout(**layout.to_json()) == layout


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (5, 4), (3, 4), (1, 2), (9, 3)])
def test_rows_are_dealt_as_fully_shard_does(rows: int, ranks: int) -> None:
    """The dim-0 chunks of torch's FSDP; a rank that gets none has none."""
    import torch

    bucket = buckets(local_params((TensorSpec("w", (rows, 3), None, 0),), Layout(), 0, 0), Layout(dp=ranks, zero=3))
    found = [[s.flat for s in shards(bucket, ranks, rank, "dim0")] for rank in range(ranks)]
    chunks = torch.arange(rows * 3).view(rows, 3).chunk(ranks)
    assert found == [[(int(c[0, 0]), int(c[-1, -1]) + 1)] for c in chunks] + [[]] * (ranks - len(chunks))


def test_columns_of_a_fused_tensor_are_one_box_of_each_section() -> None:
    spec = TensorSpec("c_attn", (6, 24), Split(1, HEAD, sections=3), 0)
    assert split_boxes(spec, 1, 0) == (Box.whole(spec.shape),)
    assert [box.bounds()[1] for box in split_boxes(spec, 2, 1)] == [[4, 8], [12, 16], [20, 24]]
    (param,) = local_params((spec,), Layout(tp=2), 0, 1)
    assert param.shape == (18, 4)
