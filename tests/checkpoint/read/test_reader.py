"""Reading boxes and ranges of tensors, and the damage that a read meets."""

import os
from pathlib import Path

import numpy as np
import pytest

from tk.checkpoint import Checkpoint, reshard
from tk.checkpoint.format.chunk import BLOCK
from tk.core.errors import ShapeMismatch, ShardCorrupt, ShardMissing
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.tensors import Split, TensorSpec
from tk.scripts.broken_checkpoints import flip
from tk.tests.checkpoint.saving import save_step


def test_damage_is_named_and_refused_on_every_way_out(step: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = Checkpoint.open_step(step)
    chunk = checkpoint.chunks[name, "exp_avg"][1]
    flip(step / chunk.file, chunk.offset + chunk.nbytes - 1)
    (problem,) = checkpoint.verify().problems
    assert (problem.tensor, problem.slot, problem.file, problem.block) == (name, "exp_avg", chunk.file, 0)
    with pytest.raises(ShardCorrupt, match=f"{chunk.file}: block 0 of {name}, slot exp_avg"):
        checkpoint.read(name, slot="exp_avg")
    with pytest.raises(ShardCorrupt, match=name):
        reshard(step, tmp_path / "new", layout=Layout())
    assert sorted(os.listdir(tmp_path)) == ["run"]
    checkpoint.read(name)
    reshard(step, tmp_path / "new", layout=Layout(), weights_only=True)


def test_a_large_tensor_is_checked_by_blocks(tmp_path: Path) -> None:
    """Two blocks a rank: tiles and blocks do not line up with one another; column reads check them too."""
    table = (TensorSpec("a", (1600, 7000), Split(1, 2), 0), TensorSpec("b", (4_500_001,), None, 0))
    saved = save_step(tmp_path / "run", table, Layout(tp=2), {"weight": "F32"})
    checkpoint = Checkpoint.open(saved)
    whole = checkpoint.read("a").numpy()
    box = Box((1000, 3000), (500, 2000))
    assert np.array_equal(checkpoint.read("a", box).numpy(), whole[box.slices])
    again = Checkpoint.open(reshard(saved, tmp_path / "tp4", layout=Layout(tp=4)))
    assert np.array_equal(again.read("a").numpy(), whole)
    assert again.verify().ok
    chunk = checkpoint.chunks["a", "weight"][1]
    assert len(chunk.crc or ()) == 2
    flip(saved / chunk.file, chunk.offset + BLOCK + 5)
    assert [(p.tensor, p.block) for p in checkpoint.verify().problems] == [("a", 1)]
    checkpoint.read("a", Box((0, 3500), (100, 3500)))
    for part in (None, Box((1300, 3600), (1, 1))):
        with pytest.raises(ShardCorrupt, match="block 1 of a"):
            checkpoint.read("a", part)
    with pytest.raises(ShardCorrupt, match="block 1 of a"):
        reshard(saved, tmp_path / "tp1", layout=Layout())


def test_reads_outside_a_tensor(good: Path) -> None:
    checkpoint = Checkpoint.open(good)
    name = "model.norm.weight"
    for box, flat in ((Box((0,), (33,)), None), (Box((0, 0), (1, 1)), None), (None, (5, 40)), (None, (9, 3))):
        with pytest.raises(ShapeMismatch, match="is not in it"):
            checkpoint.read(name, box, flat=flat)
    with pytest.raises(ShardMissing, match="no tensor 'nope'"):
        checkpoint.read("nope")
    with pytest.raises(ShardMissing, match="no slot 'master'"):
        checkpoint.read(name, slot="master")


def test_a_tensor_is_read_by_a_further_name(good: Path) -> None:
    checkpoint = Checkpoint.open(good)
    name = next(iter(checkpoint.tensors))
    other = checkpoint.also_named({"another": name})
    assert np.array_equal(other.read("another").numpy(), checkpoint.read(name).numpy())
    assert other.tensors["another"].shape == checkpoint.tensors[name].shape
    assert "another" not in checkpoint.tensors
