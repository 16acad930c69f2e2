"""Runs with activations on the host: every layout has the bits of the same layout that keeps them on its device."""

from contextlib import closing
from typing import Any

import pytest
import torch

from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer

pytestmark = [pytest.mark.timeout(600)]

STEPS = 3
CASES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"dp": 2}, 3, "none", "bf16"),
    ({"tp": 2, "sequence_parallel": True}, 0, "selective", "fp32"),
    ({"pp": 2, "schedule": "zb-h1"}, 2, "none", "fp16"),
    ({"pp": 2, "schedule": "gpipe"}, 1, "full", "fp32"),
]
SCHEDULES: list[dict[str, Any]] = [{"schedule": name} for name in ("gpipe", "1f1b", "zb-h1")]
SCHEDULES.append({"schedule": "interleaved", "num_virtual_stages": 2})
MATRIX: list[tuple[dict[str, Any], int, str, str]] = [
    (parallel, zero, recompute, precision)
    for parallel in (
        {"dp": 2},
        {"tp": 2, "dp": 2, "sequence_parallel": True},
        *({"pp": 2, "dp": 2} | schedule for schedule in SCHEDULES),
    )
    for zero in (0, 1, 2, 3)
    for recompute in ("none", "selective", "full")
    for precision in ("fp32", "bf16", "fp16")
]
MODELS: dict[str, dict[str, Any]] = {
    "experts": {"model": {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}},
    "packed documents": {"data": {"packing": "documents"}},
    "frozen, learned positions": {
        "model": {"architecture": "gpt2", "num_key_value_heads": 4},
        "train": {"freeze": ["model.layers.0"]},
    },
}


def run(configs: list[dict[str, Any]]) -> list[tuple[list[float], list[int]]]:
    """Trains with each configuration; returns what each computed, and the bytes that its pool held after each step."""
    found = []
    for config in configs:
        trainer, numbers, held = make_trainer(config), [], []
        with closing(trainer.engine.optimizer):
            for _ in range(STEPS):
                result = trainer.step()
                numbers += [result.loss, result.grad_norm, result.balance_loss]
                held.append(trainer.engine.activations.pool.held if trainer.engine.activations else 0)
            numbers.append(trainer._evaluate())
            weights = [values.clone() for _, values in trainer.engine.optimizer.runs("master")]
            numbers += torch.cat(weights).tolist()
        found.append((numbers, held))
    return found


def check_bits(rank_pool: RankPool, configure: Configure, ranks: int, **sections: dict[str, Any]) -> None:
    """Micro-batches accumulate, the last one is short, and clipping acts."""
    sections["train"] = {"global_batch_size": 10, "micro_batch_size": 4, "seq_len": 48} | sections.get("train", {})
    sections["optimizer"] = {"grad_clip": 0.01, "schedule": "constant", "warmup_steps": 0}
    configs = [configure("run", **sections, offload={"activations": place}) for place in ("none", "cpu")]
    for (kept, nothing), (moved, held) in rank_pool.run(run, ranks, configs=configs):
        assert kept == moved
        assert not any(nothing)
        assert held[0] == held[-1] > 0


@pytest.mark.parametrize(
    ("parallel", "zero", "recompute", "precision"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)],
)
def test_a_layout_has_the_bits_of_one_that_keeps_its_activations(
    rank_pool: RankPool, configure: Configure, parallel: dict[str, Any], zero: int, recompute: str, precision: str
) -> None:
    ranks = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1)
    check_bits(
        rank_pool,
        configure,
        ranks,
        model={"num_hidden_layers": 4},
        parallel=parallel,
        zero={"stage": zero},
        recompute={"mode": recompute},
        precision={"params": precision},
    )
