"""Ranks of one host resume, and load weights, from another layout: their common reads, in real processes."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.core.config import parse
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.model.peers import peers
from tk.parallel.host import host_group
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import Mesh
from tk.tests.checkpoint.thread_peers import counted_reads
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.run.run_start import RunStart
from tk.train.run.trainer import Trainer

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}


def _trainer(config: dict[str, Any]) -> Trainer:
    parsed = parse(config, TrainConfig, "test")
    return Trainer(parsed, Mesh.build(parsed.layout(torch.distributed.get_world_size()), 2))


def train(config: dict[str, Any]) -> None:
    """Trains on this rank to the end."""
    _trainer(config).fit()


def resume(config: dict[str, Any], step: str) -> list[int]:
    """Bytes read in resuming on this rank; then every value is compared with the read of one process."""
    trainer = _trainer(config)
    with trainer.checkpointer.open(trainer.save_options()) as run:
        with counted_reads() as reads:
            RunStart(trainer.checkpointer, run, trainer.config, trainer.inputs).begin("auto", fork=False)
        checkpoint = Checkpoint.open(step)
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            for shard, values in trainer.engine.optimizer.runs(slot):
                stored = "weight" if slot == "master" else slot
                wanted = checkpoint.read(shard.piece.tensor.name, shard.piece.box, stored, shard.flat).torch()
                assert torch.equal(values, wanted), shard
        for piece, values in trainer.checkpointer.snapshot.weights.items():
            assert torch.equal(values, checkpoint.read(piece.tensor.name, piece.box).torch().reshape(-1)), piece
    return [reads.nbytes]


def load_slice(config: dict[str, Any], step: str) -> list[int]:
    """Bytes read in loading this tensor-parallel rank's weights; compared with a load by itself."""
    trainer = _trainer(config)
    model, tp, device = trainer.inputs.model, trainer.mesh.tp, trainer.device
    found, wanted = (Decoder(model, LayerContext(tp, torch.bfloat16, device)) for _ in range(2))
    with counted_reads() as reads:
        load_weights(found, Checkpoint.open(step), peers=peers(host_group(trainer.mesh.world, 60)))
    load_weights(wanted, Checkpoint.open(step))
    for one, two in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, two)
    return [reads.nbytes]


def die_in_the_middle(config: dict[str, Any], step: str) -> None:
    """Loads; rank 1 is gone after its first tensor."""
    trainer = _trainer(config)

    def die(num_bytes: int) -> None:
        if trainer.mesh.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    load_weights(trainer.stages[0], Checkpoint.open(step), die, peers(trainer.mesh.world))


def size(step: Path, pattern: str) -> int:
    """Bytes of the tensors' files."""
    return sum(path.stat().st_size for path in step.glob(pattern))


def test_ranks_of_a_host_read_a_checkpoint_once(rank_pool: RankPool, configure: Configure, tmp_path: Path) -> None:
    def at(run: str, **sections: dict[str, Any]) -> dict[str, Any]:
        return configure(run, model=SHAPE, train={"steps": 1, "global_batch_size": 4}, **sections)

    rank_pool.run(train, 4, config=at("run", parallel={"dp": 4}, zero={"stage": 1}))
    step = tmp_path / "run" / "step-00000001"
    across = at("run", parallel={"tp": 2, "dp": 2}, zero={"stage": 1})
    read = sum(nbytes for [nbytes] in rank_pool.run(resume, 4, config=across, step=str(step)))
    assert 0.98 * size(step, "*.safetensors") < read <= 1.02 * size(step, "*.safetensors")
    sliced = at("other", parallel={"tp": 2})
    read = sum(nbytes for [nbytes] in rank_pool.run(load_slice, 2, config=sliced, step=str(step)))
    assert 0.98 * size(step, "model-*") < read <= 1.02 * size(step, "model-*")


def test_a_rank_that_dies_in_a_load_ends_the_others(rank_pool: RankPool, configure: Configure, tmp_path: Path) -> None:
    config = configure(train={"steps": 1})
    Trainer(parse(config, TrainConfig, "test")).fit()
    config["parallel"] = {"tp": 2}
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        rank_pool.run(die_in_the_middle, 2, config=config, step=str(tmp_path / "run" / "step-00000001"))
    assert "ended with exit code -9" in str(failure.value)
    assert "rank 0:" in str(failure.value), "it got the error, and did not wait"
    assert time.monotonic() - start < 120, "far less than the half hour after which gloo gives up"
