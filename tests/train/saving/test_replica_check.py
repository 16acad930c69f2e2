"""Replicas that drift apart: found before a save is written, and named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint.run.run_folder import RunFolder
from tk.core.errors import TkError
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.saving.replica_check import checksum


def train_with_fault(config: dict[str, Any], slot: str, name: str, faulty_rank: int) -> str:
    """Returns the error of a training in which, on one rank, one value changes by its last bit after step 2."""

    def corrupt(step: int, result: object) -> None:
        if step != 2 or trainer.mesh.world.rank != faulty_rank:
            return
        if slot == "weight":
            weights = trainer.checkpointer.snapshot.weights.items()
            values = next(values for piece, values in weights if piece.tensor.name == name)
        else:
            runs = trainer.engine.optimizer.runs(slot)
            values = next(values for shard, values in runs if shard.piece.tensor.name == name)
        values.view(torch.int32)[3] ^= 1

    trainer = make_trainer(config, on_step=corrupt)
    try:
        trainer.fit()
    except TkError as error:
        return str(error)
    return "it trained to the end"


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("layout", "slot", "name", "rank", "camps"),
    [
        ((1, 2, 0), "weight", "model.layers.1.mlp.down_proj.weight", 1, "rank 0 / rank 1"),
        pytest.param((1, 2, 0), "exp_avg", "model.embed_tokens.weight", 0, "rank 0 / rank 1", marks=pytest.mark.matrix),
        pytest.param(
            (2, 2, 1), "weight", "model.layers.0.mlp.up_proj.weight", 3, "rank 1 / rank 3", marks=pytest.mark.matrix
        ),
        ((2, 2, 1), "weight", "model.norm.weight", 2, "ranks 0, 1, 3 / rank 2"),
        ((4, 1, 0), "weight", "model.layers.0.self_attn.k_proj.weight", 2, "rank 2 / rank 3"),
    ],
)
def test_drift_ends_the_job_and_names_tensor_and_ranks(
    rank_pool: RankPool,
    configure: Configure,
    tmp_path: Path,
    layout: tuple[int, int, int],
    slot: str,
    name: str,
    rank: int,
    camps: str,
) -> None:
    tp, dp, zero = layout
    config = configure(train={"steps": 4}, parallel={"tp": tp, "dp": dp}, zero={"stage": zero}, checkpoint={"every": 1})
    messages = rank_pool.run(train_with_fault, tp * dp, config=config, slot=slot, name=name, faulty_rank=rank)
    for message in messages:
        assert f"Step 2 was not saved: replicas that must be bit-equal have drifted apart in {name}" in message
        assert f"slot {slot}: {camps} differ" in message
        assert "Look for values that a script wrote into parameters or buffers on some ranks only" in message
    assert [step for step, _ in RunFolder(tmp_path / "run").steps()] == [1], "the save before it is there"


def test_drift_that_is_found_late_leaves_nothing(rank_pool: RankPool, configure: Configure, tmp_path: Path) -> None:
    """Copied at step 2, found at the update of step 3: at no time is there anything of step 2 on disk."""
    config = configure(train={"steps": 4}, parallel={"dp": 2}, zero={"stage": 1}, checkpoint={"every": 2})
    name = "model.norm.weight"
    for message in rank_pool.run(train_with_fault, 2, config=config, slot="weight", name=name, faulty_rank=1):
        assert "Step 2 was not saved" in message
    assert not list((tmp_path / "run").glob("step-*"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2], "step 3 was not taken"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 7, 8])
def test_a_checksum_does_not_depend_on_where_values_lie(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size).to(dtype)
    wanted = checksum(values)
    for offset in (1, 2, 3):
        elsewhere = torch.zeros(size + offset, dtype=dtype)
        elsewhere[offset:] = values
        assert checksum(elsewhere[offset:]) == wanted
        for index in range(size):
            other = elsewhere[offset:].clone()
            other.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[index] ^= 1
            assert checksum(other) != wanted
