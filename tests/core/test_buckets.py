"""Flat buckets and their shards."""

from itertools import groupby

import pytest
import torch
from hypothesis import given

from tk.core.buckets import buckets, shards
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.tensors import TensorSpec
from tk.tests.core.layouts import layouts, tables
from tk.tests.example_counts import examples


@examples(40)
@given(tables(), layouts())
def test_the_shards_of_a_group_hold_its_parameters_once(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    params = local_params(table, layout, 0, layout.tp - 1)
    flat = buckets(params, layout)
    for bucket in flat:
        assert bucket.size % layout.group_size == 0
        assert all(a + p.size <= b for a, b, p in zip(bucket.offsets, bucket.offsets[1:], bucket.params, strict=False))
        decayed = [param.decay for param in bucket.params]
        assert decayed == sorted(decayed, reverse=True)
        for run in bucket.runs:
            inside = [p for p, at in zip(bucket.params, bucket.offsets, strict=True) if run.begin <= at < run.end]
            assert {param.decay for param in inside} == {run.decay}
        assert [run.begin for run in bucket.runs] == [0, *(run.end for run in bucket.runs[:-1])]
        assert bucket.runs[-1].end == bucket.size
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


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (5, 4), (3, 4), (1, 2), (9, 3)])
def test_rows_are_dealt_as_fully_shard_does(rows: int, ranks: int) -> None:
    """torch's FSDP chunks tensors along dim 0; a rank without rows has no shard."""
    bucket = buckets(local_params((TensorSpec("w", (rows, 3), None, 0),), Layout(), 0, 0), Layout(dp=ranks, zero=3))
    found = [[s.flat for s in shards(bucket, ranks, rank, "dim0")] for rank in range(ranks)]
    chunks = torch.arange(rows * 3).view(rows, 3).chunk(ranks)
    assert found == [[(int(c[0, 0]), int(c[-1, -1]) + 1)] for c in chunks] + [[]] * (ranks - len(chunks))
