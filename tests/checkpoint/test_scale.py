"""Checkpoints of many ranks: one tensor opens its own parts only, a region finds its chunks without looking at all."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tk.benchmarks.synthetic_checkpoint import SLOTS, llama_405b, make_step, plan_rank
from tk.checkpoint import Checkpoint, prepare_export
from tk.checkpoint.format.chunk import Chunk
from tk.checkpoint.format.chunk_index import TensorChunks
from tk.checkpoint.format.region import Region, shared_span
from tk.checkpoint.format.safetensors_file import build_header
from tk.checkpoint.read.step_folder import StepFolder
from tk.core import dtypes
from tk.core.errors import ShardCorrupt, ShardMissing
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.tensors import Split, TensorSpec, split_boxes
from tk.tests.call_count import count_calls

TABLE = llama_405b(num_layers=4)
LAYOUT = Layout(tp=8, pp=4, dp=4, zero=1)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "step-00000001"
    assert make_step(folder, TABLE, LAYOUT) > 2500
    return folder


def test_one_tensor_opens_its_own_parts_only(step: Path) -> None:
    folder = StepFolder.open(step)
    checkpoint = Checkpoint(folder)
    assert folder.parts.opened == ()
    assert len(checkpoint.chunks) == len(checkpoint.tensors) * len(SLOTS)
    chunks = checkpoint.chunks["model.layers.2.mlp.down_proj.weight", "weight"]
    holders = {f"{int(chunk.file[6:11]):05d}.json" for chunk in chunks}
    assert set(folder.parts.opened) == holders
    assert len(holders) == LAYOUT.tp * LAYOUT.dp
    target = Layout(tp=4, pp=2, dp=2, zero=1)
    assert plan_rank(checkpoint, TABLE, target, 3) > 200
    assert len(folder.parts.opened) < LAYOUT.world_size
    checkpoint.check()
    assert len(folder.parts.opened) == LAYOUT.world_size


def test_damage_in_one_part_is_met_by_those_who_open_it(step: Path) -> None:
    part, file = step / "parts" / "00000.json", step / "model-00127.safetensors"
    good = part.read_bytes()
    part.write_bytes(good.replace(b"weight", b"Weight", 1))
    file.rename(step / "elsewhere")
    try:
        checkpoint = Checkpoint.open(step)
        checkpoint.chunks["model.layers.1.mlp.up_proj.weight", "weight"]
        with pytest.raises(ShardCorrupt, match=r"00000\.json is not the file that was saved"):
            checkpoint.chunks["model.layers.0.mlp.up_proj.weight", "weight"]
        with pytest.raises(ShardMissing, match=r"model-00127\.safetensors is missing"):
            checkpoint.chunks["model.layers.3.mlp.up_proj.weight", "weight"]
        with pytest.raises(ShardCorrupt, match=r"00000\.json"):
            checkpoint.check()
        with pytest.raises(ShardCorrupt, match=r"00000\.json"):
            Checkpoint.open_step(step)
    finally:
        part.write_bytes(good)
        (step / "elsewhere").rename(file)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """A tensor cut by tensor parallelism along one dim, each box by flat ranges."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim, tp = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    chunks = []
    for rank in range(tp):
        (box,) = split_boxes(TensorSpec("t", shape, Split(dim, rule="pad")), tp, rank)
        cuts = sorted({0, box.size, *draw(st.lists(st.integers(0, box.size), max_size=4))})
        chunks += [Chunk("t", "weight", box, (a, b), "f", 0, 4 * (b - a), (0,)) for a, b in pairwise(cuts)]
    return shape, draw(st.permutations(chunks))


@settings(max_examples=80, deadline=None)
@given(cut_tensors(), st.data())
def test_a_region_finds_every_chunk_that_it_meets(
    tensor: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject
) -> None:
    shape, chunks = tensor
    index = TensorChunks("t", chunks, shape, dtypes.FP32)
    assert sorted(index, key=repr) == sorted(chunks, key=repr)
    low = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    high = [data.draw(st.integers(a + 1, extent)) for a, extent in zip(low, shape, strict=True)]
    region = Region.of(Box.from_bounds(list(zip(low, high, strict=True))))
    wanted = {chunk for chunk in chunks if shared_span(chunk.region, region)}
    found = list(index.find(region))
    assert wanted <= set(found)
    assert len(found) == len(set(found))
    boxes = {chunk.box for chunk in wanted}
    assert {chunk.box for chunk in found} == boxes  # at most the runs between the first and last shared element


def test_twice_as_many_tensors_take_twice_the_work(tmp_path: Path) -> None:
    """Opening a Hugging Face folder, planning its export, making it, opening what was made: none grows faster."""

    def calls(num_tensors: int) -> list[int]:
        folder = tmp_path / str(num_tensors)
        folder.mkdir()
        rows = [(f"model.layers.{index}.w.weight", "F32", (4,)) for index in range(num_tensors)]
        data = np.zeros(4 * num_tensors, np.float32).tobytes()
        (folder / "model.safetensors").write_bytes(build_header(rows, marked=False)[0] + data)
        made = tmp_path / f"made-{num_tensors}"
        return [
            count_calls(lambda: Checkpoint.open(folder)),
            count_calls(lambda: prepare_export(Checkpoint.open(folder), made)),
            count_calls(prepare_export(Checkpoint.open(folder), made).run),
            count_calls(lambda: Checkpoint.open(made).check()),
        ]

    once, twice = calls(150), calls(300)
    assert all(more < 2.1 * less for less, more in zip(once, twice, strict=True)), (once, twice)


def test_twice_as_many_boxes_of_a_tensor_take_twice_the_work() -> None:
    """The index of the chunks of a grid."""

    def calls(columns: int) -> int:
        grid = [Box((2 * row, 3 * column), (2, 3)) for row in range(20) for column in range(columns)]
        chunks = [Chunk("t", "weight", box, None, "f", 0, 4 * box.size, (0,)) for box in grid]
        return count_calls(lambda: TensorChunks("t", chunks, (40, 3 * columns), dtypes.FP32))

    assert calls(80) < 2.1 * calls(40)
