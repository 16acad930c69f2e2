"""Runs with states on the host or on disk: on a CPU they have the bits of a run that keeps them."""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer, run_training
from tk.train.zero.flat_bucket import FlatBucket

pytestmark = [pytest.mark.timeout(600)]

DISK, HOST = {"optimizer": "disk", "gradients": "disk"}, {"optimizer": "cpu", "gradients": "cpu"}
STATES = {"optimizer": "disk"}
CASES: list[tuple[dict[str, Any], int, str, dict[str, Any]]] = [
    ({"dp": 1}, 0, "bf16", DISK),
    ({"dp": 2}, 3, "bf16", DISK | {"parameters": "disk"}),
    ({"pp": 2}, 2, "fp16", DISK),
]
MATRIX: list[tuple[dict[str, Any], int, str, dict[str, Any]]] = [
    (parallel, zero, precision, offload | ({"parameters": offload["optimizer"]} if zero == 3 else {}))
    for parallel in ({"dp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2, "schedule": "zb-h1"})
    for zero in (0, 1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
    for offload in (DISK, HOST, STATES)
]


def same_bits(one: Checkpoint, other: Checkpoint) -> None:
    """Every value of every slot is the same."""
    assert one.step == other.step
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.slots == other.tensors[name].slots
        for slot in tensor.slots:
            mine, theirs = (each.read(name, slot=slot).numpy() for each in (one, other))
            assert np.array_equal(mine.view(np.uint8), theirs.view(np.uint8)), (name, slot)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("parallel", "zero", "precision", "offload"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)],
)
def test_a_run_has_the_bits_of_one_that_keeps_its_states(
    rank_pool: RankPool,
    configure: Configure,
    tmp_path: Path,
    parallel: dict[str, Any],
    zero: int,
    precision: str,
    offload: dict[str, Any],
) -> None:
    """Two runs: one keeps its states for three steps and moves them for the others, the other one the reverse.

    Clipping acts in every step, the last micro-batch is short, fp16 skips steps, and both resume at the other tier.
    """
    ranks = math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "dp"))
    losses: dict[str, list[float]] = {}
    for name, tiers in (("kept first", [{}, offload]), ("moved first", [offload, {}])):
        losses[name] = []
        for steps, tier in zip((3, 6), tiers, strict=True):
            config = configure(
                name,
                train={"steps": steps, "global_batch_size": 7, "eval_every": 2},
                optimizer={"grad_clip": 0.01, "schedule": "constant", "warmup_steps": 0},
                precision={"params": precision, "initial_loss_scale": 2.0**24},
                parallel=parallel,
                zero={"stage": zero},
                offload=tier,
                checkpoint={"every": 2},
            )
            losses[name] += rank_pool.run(run_training, ranks, config=config)[0]["loss"]
    assert losses["kept first"] == losses["moved first"]
    assert len(losses["kept first"]) == 6
    for step in (2, 3, 4, 6):
        same_bits(*(Checkpoint.open(tmp_path / run / f"step-{step:08d}") for run in losses))


@pytest.mark.parametrize("zero", [0, 3])
def test_the_next_step_begins_while_the_update_runs_though_gradients_are_clipped(
    configure: Configure, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's states arrive only once the first layer of the next step has computed."""
    has_computed, waited = threading.Event(), []
    trainer = make_trainer(
        configure(optimizer={"grad_clip": 0.01}, precision={"params": "bf16"}, zero={"stage": zero}, offload=HOST)
    )
    optimizer, last = trainer.engine.optimizer, 0  # the last layers are in the first bucket
    update = optimizer._update

    def updating(bucket: FlatBucket, *arguments: Any) -> None:
        if bucket is trainer.engine.buffers.buckets[last]:
            waited.append(has_computed.wait(60))
        update(bucket, *arguments)

    trainer.step()
    optimizer.finish()
    monkeypatch.setattr(optimizer, "_update", updating)
    trainer.step()
    first = trainer.stages[0].model.layers["0"]
    first.register_forward_hook(lambda *arguments: has_computed.set())
    trainer.step()
    optimizer.finish()
    assert waited == [True, True]
