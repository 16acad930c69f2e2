"""Checkpoints of many ranks: one tensor opens its own parts only, a region finds its chunks without looking at all."""

from pathlib import Path

import numpy as np
import pytest

from tk.benchmarks.synthetic_checkpoint import SLOTS, llama_405b, make_step, plan_rank
from tk.checkpoint import Checkpoint, prepare_export
from tk.checkpoint.format.safetensors_file import build_header
from tk.checkpoint.read.step_folder import StepFolder
from tk.core.errors import ShardCorrupt, ShardMissing
from tk.core.layout import Layout
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


def test_twice_as_many_tensors_take_twice_the_work(tmp_path: Path) -> None:
    """Opening a Hugging Face folder, planning its export, making it, opening the result: none grows faster."""

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
