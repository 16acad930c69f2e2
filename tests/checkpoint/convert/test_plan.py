"""The arithmetic of copying: tiles meet every chunk once, strictly forward, and small tiles give the same bytes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.checkpoint import Checkpoint, Options, prepare_reshard
from tk.checkpoint.convert.copy import run_copy
from tk.checkpoint.convert.plan import select, tiles
from tk.checkpoint.format.region import Region, copy_region, count_before, position_of, shared_span
from tk.core import dtypes
from tk.core.dtypes import BF16, FP32
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.saving import MIXED, STATES, assert_equal, llama_table, save_step, true_values


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    low = [draw(st.integers(0, extent - 1)) for extent in shape]
    high = [draw(st.integers(a + 1, extent)) for a, extent in zip(low, shape, strict=True)]
    box = Box.from_bounds(list(zip(low, high, strict=True)))
    start = draw(st.integers(0, box.size - 1))
    return Region(box, start, draw(st.integers(start + 1, box.size)))


@st.composite
def region_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return shape, draw(regions(shape)), draw(regions(shape))


def positions(region: Region, shape: tuple[int, ...]) -> np.ndarray:
    """The region's elements by their place in the whole tensor."""
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return whole[region.box.slices].reshape(-1)[region.start : region.stop]


@given(region_pairs())
def test_regions_share_what_their_elements_share(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, source, target = case
    here, there = positions(source, shape), positions(target, shape)
    into = np.full(len(there), -1)
    copy_region(into, target, here, source)
    assert into.tolist() == np.where(np.isin(there, here), there, -1).tolist()
    shared = np.flatnonzero(np.isin(here, there))
    span = (source.start + shared[0], source.start + shared[-1] + 1) if len(shared) else None
    assert shared_span(source, target) == span


@given(region_pairs())
def test_places_in_a_box_and_in_the_tensor(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, region, _ = case
    whole = positions(Region.of(region.box), shape)
    assert [position_of(region.box, shape, i) for i in range(region.box.size)] == whole.tolist()
    for place in range(int(np.prod(shape)) + 1):
        assert count_before(region.box, shape, place) == (whole < place).sum()


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


def test_tiny_tiles_write_the_same_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_step(tmp_path / "run", llama_table(layers=2), Layout(tp=4, dp=2, zero=1)))
    plan = prepare_reshard(checkpoint, tmp_path / "new", Options(Layout(tp=2))).plan
    folders = [tmp_path / "tiny", tmp_path / "usual"]
    parts = []
    for folder, tile_bytes in zip(folders, (64, 2**22), strict=True):
        folder.mkdir()
        done: list[int] = []
        parts.append(run_copy(plan, checkpoint, folder, done.append, tile_bytes))
        assert sum(done) == plan.bytes_read
    assert parts[0] == parts[1]
    for name in parts[0][0].files:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_what_a_dtype_change_takes_from_where() -> None:
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
