"""The arithmetic of copying: tiles meet every chunk once, strictly forward, and small tiles give the same bytes."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, Options, prepare_reshard
from tk.checkpoint.convert.plan import select, tiles
from tk.core import dtypes
from tk.core.dtypes import BF16, FP32
from tk.core.layout import Layout
from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.saving import MIXED, STATES, assert_equal, llama_table, save_step, true_values


@pytest.mark.parametrize("tile_bytes", [60, 1000, 2**22])
@pytest.mark.parametrize(
    ("source", "target"), [(Layout(tp=4, dp=2, zero=1), Layout()), (Layout(dp=3, zero=3), Layout(tp=2, pp=2))]
)
def test_every_byte_passes_once_and_in_order(
    tmp_path: Path, table: tuple[TensorSpec, ...], source: Layout, target: Layout, tile_bytes: int
) -> None:
    small = llama_table(layers=2)
    checkpoint = Checkpoint.open(save_step(tmp_path / "run", small, source, MIXED))
    prepared = prepare_reshard(checkpoint, tmp_path / "new", Options(target))
    read: dict[object, int] = {}
    written: dict[object, int] = {}
    for tile in tiles(prepared.plan, tile_bytes):
        assert tile.region.size * tile.slot_copy.selection.source_dtype.itemsize <= tile_bytes
        for runs, ends, whole in (
            (tile.reads, read, [chunk.region for chunk in tile.slot_copy.sources]),
            (tile.writes, written, [target.entry.region for target in tile.slot_copy.targets]),
        ):
            for run in runs:
                key = (tile.slot_copy.selection, run.index)
                assert run.region.start == ends.get(key, whole[run.index].start)
                ends[key] = run.region.stop
    assert list(read.values()) == [c.region.stop for j in prepared.plan.slot_copies for c in j.sources if c.region.size]
    assert list(written.values()) == [t.entry.region.stop for j in prepared.plan.slot_copies for t in j.targets]
    assert prepared.plan.bytes_read == sum(c.nbytes for chunks in checkpoint.chunks.values() for c in chunks)


def test_a_change_of_dtype_casts_from_the_master_or_the_weight() -> None:
    def slots(
        stored: dict[str, str], dtype: dtypes.DType | None, weights_only: bool = False
    ) -> dict[str, tuple[str, str]]:
        from tk.checkpoint.format.manifest import StoredTensor

        chosen = select({"w": StoredTensor((2,), stored)}, ["w"], dtype, weights_only)
        return {s.slot: (s.source_slot, s.target_dtype.code) for s in chosen}

    states = {"exp_avg": ("exp_avg", "F32"), "exp_avg_sq": ("exp_avg_sq", "F32")}
    assert slots(MIXED, None) == {"weight": ("weight", "BF16"), "master": ("master", "F32")} | states
    assert slots(MIXED, BF16) == {"weight": ("weight", "BF16"), "master": ("master", "F32")} | states
    assert slots(MIXED, FP32) == {"weight": ("master", "F32")} | states
    assert slots(MIXED, dtypes.FP16)["weight"] == ("master", "F16")
    assert slots(STATES, BF16) == {"weight": ("weight", "BF16"), "master": ("weight", "F32")} | states
    assert slots(STATES, BF16, weights_only=True) == {"weight": ("weight", "BF16")}
    assert slots(MIXED, FP32, weights_only=True) == {"weight": ("master", "F32")}


def test_a_read_in_fp32_takes_the_master(tmp_path: Path, table: tuple[TensorSpec, ...]) -> None:
    found = Checkpoint.open(save_step(tmp_path / "run", table, Layout(tp=2)))
    spec = table[3]
    assert_equal(found.read(spec.name, dtype=FP32).numpy(), true_values(spec, "master", "F32"))
    assert_equal(found.read(spec.name, dtype=BF16).numpy(), true_values(spec, "weight", "BF16"))
    assert_equal(found.read(spec.name).numpy(), true_values(spec, "weight", "BF16"))
