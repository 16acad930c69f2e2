"""Flat buckets and their shards."""

import zlib
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given

from tk.core import buckets as core_buckets
from tk.core.buckets import buckets, shards
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.tensors import TensorSpec, with_slots
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.tests.checkpoint.saving import llama_table, mixed_table
from tk.tests.core.layouts import CUTS, layouts, tables
from tk.tests.example_counts import examples


def runs_of_group(
    table: tuple[TensorSpec, ...], layout: Layout, rank: int, family: str
) -> list[tuple[tuple[str, int], int, int]]:
    """Returns the runs of one family that a rank's ZeRO group updates."""
    spread = layout.families[family]
    mine = spread.place(rank)
    runs = []
    for other in range(layout.stage_size):
        place = spread.place(other)
        if (place.ep, place.tp, place.copy) == (mine.ep, mine.tp, mine.copy):
            flat = buckets(local_params(table, layout, other), layout)
            runs += [
                ((shard.piece.tensor.name, shard.piece.start), *shard.flat)
                for shard in shards(flat, layout, other)
                if flat[shard.bucket].family.name == family
            ]
    return runs


@examples(40)
@given(tables(), layouts())
def test_the_shards_of_a_group_hold_its_parameters_once(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    rank = layout.tp - 1
    params = local_params(table, layout, rank)
    for bucket in buckets(params, layout):
        assert bucket.size % layout.families[bucket.family.name].group_size == 0
        assert all(a + p.size <= b for a, b, p in zip(bucket.offsets, bucket.offsets[1:], bucket.params, strict=False))
        decayed = [param.decay for param in bucket.params]
        assert decayed == sorted(decayed, reverse=True)
        for run in bucket.runs:
            inside = [p for p, at in zip(bucket.params, bucket.offsets, strict=True) if run.begin <= at < run.end]
            assert {param.decay for param in inside} == {run.decay}
        assert [run.begin for run in bucket.runs] == [0, *(run.end for run in bucket.runs[:-1])]
        assert bucket.runs[-1].end == bucket.size
        assert len({(param.stage, param.tied) for param in bucket.params}) == 1
        assert all(param.family == bucket.family for param in bucket.params)
        if layout.zero == 3:
            assert len({param.unit for param in bucket.params}) == 1
    runs = sorted(run for name in layout.families for run in runs_of_group(table, layout, rank, name))
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


FROZEN = tuple(replace(spec, trainable=spec.name != "1.gate.weight") for spec in mixed_table())


@pytest.mark.parametrize(
    ("table", "recorded"),
    [
        (llama_table(), (2905988586, 3857453502, 3568452241, 2594898986, 664194928)),
        (llama_table(layers=6, tied=False), (731745389, 1867943142, 4202005718, 2404617489, 503602981)),
        (mixed_table(), (3934201275, 155488419, 3288092084, 296171864, 1033916714)),
        (FROZEN, (4111088979, 871417701, 1591157129, 469105200, 827750196)),
    ],
    ids=["llama", "untied", "mixed", "frozen"],
)
def test_one_family_has_the_buckets_from_before_there_were_families(
    table: tuple[TensorSpec, ...], recorded: tuple[int, ...]
) -> None:
    """`recorded` has for each of CUTS the checksum of parameters, offsets, runs and sizes, as text."""
    for layout, checksum in zip(CUTS, recorded, strict=True):
        found = []
        for pp in range(layout.pp):
            for bucket in buckets(local_params(table, layout, pp * layout.stage_size + layout.tp - 1), layout):
                runs = [(run.begin, run.end, run.decay) for run in bucket.runs]
                found.append(([param.name for param in bucket.params], bucket.offsets, runs, bucket.size))
        assert zlib.crc32(repr(found).encode()) == checksum, layout


def test_families_fill_buckets_side_by_side() -> None:
    """Each takes its parameters from backward's order; a bucket that is complete earlier comes earlier."""
    adam, muon = {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}, {"weight": "F32", "momentum": "BF16"}
    table = [
        spec
        for layer in range(4)
        for spec in (
            *with_slots([TensorSpec(f"{layer}.up", (40, 10), None, layer)], muon),
            *with_slots([TensorSpec(f"{layer}.norm", (10,), None, layer)], adam),
        )
    ]
    table += [replace(table[-1], name=f"expert {number}", layer=1, expert=number) for number in range(2)]
    layout = Layout(dp=2, ep=2, zero=1, bucket_size=900)
    found = buckets(local_params(table, layout, 0), layout)
    assert [[param.name for param in bucket.params] for bucket in found] == [
        ["expert 0"],
        ["3.up", "2.up"],
        ["3.norm", "2.norm", "1.norm", "0.norm"],
        ["1.up", "0.up"],
    ]
    assert [bucket.family.name for bucket in found] == ["experts", "dense", "dense", "dense"]
    assert [set(bucket.family.states) for bucket in found[1:]] == [{"momentum"}, set(adam) - {"weight"}, {"momentum"}]
    assert [bucket.size for bucket in found] == [32, 832, 64, 832], "padded for the ranks that share each"
    together = buckets(local_params(table, Layout(dp=2), 0), Layout(dp=2, bucket_size=900))
    assert {bucket.family.name for bucket in together} == {"dense"}, "the same ranks share all"


LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("zero", range(4))
def test_layers_are_whole_buckets_with_their_norms(zero: int) -> None:
    table = decoder_spec(ModelConfig(**LLAMA_8B)).table
    layout = Layout(dp=8, zero=zero, layer_buckets=True)
    params = local_params(table, layout, 0)
    found = buckets(params, layout)
    assert len(found) <= 40
    assert {len({param.unit for param in bucket.params}) for bucket in found} == {1}
    assert sum(len(bucket.params) for bucket in found) == len(params)
    by_size = buckets(params, replace(layout, layer_buckets=False))
    assert len(by_size) >= 195, "norms travel alone"


def test_small_layers_share_a_bucket_and_large_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 30, 1: 30, 2: 30, 3: 70, 4: 190}
    table = [
        spec
        for layer, size in sizes.items()
        for spec in (
            TensorSpec(f"{layer}.up", (size, 10), None, layer),
            TensorSpec(f"{layer}.norm", (10,), None, layer),
        )
    ]
    table += [TensorSpec("4.down", (190, 10), None, 4), TensorSpec("4.gate", (190, 10), None, 4)]
    layout = Layout(bucket_size=700, layer_buckets=True)
    monkeypatch.setattr(core_buckets, "LAYER_SIZE", 4000)
    found = [
        sorted(param.name for param in bucket.params) for bucket in buckets(local_params(table, layout, 0), layout)
    ]
    assert found == [
        ["4.down", "4.gate", "4.norm"],
        ["4.up"],
        ["3.norm", "3.up"],
        ["1.norm", "1.up", "2.norm", "2.up"],
        ["0.norm", "0.up"],
    ]
    at_three = replace(layout, zero=3)
    assert len(buckets(local_params(table, at_three, 0), at_three)) == 6, "at stage 3 no bucket has two layers"


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (5, 4), (3, 4), (1, 2), (9, 3)])
def test_rows_are_dealt_as_fully_shard_does(rows: int, ranks: int) -> None:
    """torch's FSDP chunks tensors along dim 0; a rank without rows has no shard."""
    layout = Layout(dp=ranks, zero=3, sharding="dim0")
    bucket = buckets(local_params((TensorSpec("w", (rows, 3), None, 0),), layout, 0), layout)
    found = [[s.flat for s in shards(bucket, layout, rank)] for rank in range(ranks)]
    chunks = torch.arange(rows * 3).view(rows, 3).chunk(ranks)
    assert found == [[(int(c[0, 0]), int(c[-1, -1]) + 1)] for c in chunks] + [[]] * (ranks - len(chunks))
