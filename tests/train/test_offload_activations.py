"""Runs with activations on the host: every layout has the bits of the same layout that keeps them on its device."""

from contextlib import closing
from itertools import product
from typing import Any

import pytest
import torch

from tk.parity.foreign import make_module, micro_batch
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.foreign.model_engine import initialize
from tk.train.planning.planned_run import prepare_run

pytestmark = [pytest.mark.timeout(600)]

STEPS = 2
CASES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"tp": 2, "sequence_parallel": True}, 0, "selective", "fp32"),
    ({"pp": 2, "schedule": "zb-h1"}, 2, "full", "fp16"),
    ({"schedule": "gpipe"}, 0, "none", "bf16"),
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
        torch.compiler.reset()
        trainer, numbers, held = make_trainer(config), list[float](), list[int]()
        with closing(trainer.engine.optimizer):
            for _ in range(STEPS):
                result = trainer.step()
                numbers += [result.loss, result.grad_norm, result.balance_loss]
                if trainer.engine.activations is not None:
                    pool = trainer.engine.activations.pool
                    assert pool.in_use == 0
                    assert pool.held <= pool.most
                    held.append(pool.held)
            numbers.append(trainer._evaluate())
            weights = [values.clone() for _, values in trainer.engine.optimizer.runs("master")]
            numbers += torch.cat(weights).tolist()
        found.append((numbers, held))
    return found


def check_bits(rank_pool: RankPool, configure: Configure, ranks: int, **sections: dict[str, Any]) -> list[int]:
    """Micro-batches accumulate, the last one is short, and clipping acts.

    Returns:
        The bytes that the pool of the first rank held after each step.
    """
    sections["train"] = {"global_batch_size": 10, "micro_batch_size": 4, "seq_len": 48} | sections.get("train", {})
    sections["optimizer"] = {"grad_clip": 0.01, "schedule": "constant", "warmup_steps": 0}
    configs = [configure("run", **sections, offload={"activations": place}) for place in ("none", "cpu")]
    answers = rank_pool.run(run, ranks, configs=configs)
    for (kept, nothing), (moved, held) in answers:
        assert kept == moved
        assert (nothing, len(held)) == ([], STEPS)
    return answers[0][1][1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("parallel", "zero", "recompute", "precision"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)],
)
def test_a_layout_has_the_bits_of_one_that_keeps_its_activations(
    rank_pool: RankPool, configure: Configure, parallel: dict[str, Any], zero: int, recompute: str, precision: str
) -> None:
    ranks = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1)
    held = check_bits(
        rank_pool,
        configure,
        ranks,
        model={"num_hidden_layers": 4 if "num_virtual_stages" in parallel else 2},
        parallel=parallel,
        zero={"stage": zero},
        recompute={"mode": recompute},
        precision={"params": precision},
    )
    assert held[0] == held[-1] > 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_other_models_have_the_bits_of_runs_that_keep_their_activations(
    rank_pool: RankPool, configure: Configure, name: str
) -> None:
    held = check_bits(rank_pool, configure, 2, zero={"stage": 3}, precision={"params": "bf16"}, **MODELS[name])
    assert 0 < held[-1] <= 1.2 * held[0], "the sizes of experts' batches, and of documents, differ from step to step"


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("gpipe", "selective"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in product(("1f1b", "gpipe"), ("none", "selective", "full"))
            if each != ("gpipe", "selective")
        ),
    ],
)
def test_the_host_holds_what_the_plan_says(configure: Configure, schedule: str, recompute: str) -> None:
    config = configure(
        model={"hidden_size": 64, "num_hidden_layers": 4},
        train={"global_batch_size": 24, "micro_batch_size": 8, "seq_len": 64},
        parallel={"schedule": schedule},
        recompute={"mode": recompute},
        offload={"activations": "cpu"},
    )
    trainer = make_trainer(config)
    trainer.step()
    assert trainer.engine.activations is not None
    [memory] = prepare_run(trainer.config, 1).memory()
    assert trainer.engine.activations.pool.most == pytest.approx(memory.host["offloaded activations"], rel=0.02)


def train_foreign(zero: Any, precision: Any, place: str) -> list[float]:
    """Trains a foreign module as a rank, with two graphs at once and one that is dropped; returns what it computed."""
    engine = initialize(
        make_module(0),
        {"grad_clip": 0.05},
        zero=zero,
        precision=precision,
        accumulate=2,
        offload={"activations": place},
    )
    inner, numbers = engine._engine, list[float]()
    with closing(inner.optimizer):
        for step in range(STEPS):
            losses = [engine(micro_batch(0, step, number)) for number in range(3)]
            engine.backward(losses.pop(0))
            engine.backward(losses.pop(1))
            numbers += [losses.pop().item()]
            engine.step()
            numbers += [engine.last_grad_norm]
            if inner.activations is not None:
                pool = inner.activations.pool
                assert (pool.held > 0, pool.in_use) == (True, 0)
        return numbers


@pytest.mark.parametrize(
    ("zero", "precision"),
    [(3, "bf16"), *(pytest.param(zero, "fp32", marks=pytest.mark.matrix) for zero in (0, 1, 2, 3))],
)
def test_a_foreign_module_has_the_bits_of_one_that_keeps_its_activations(
    rank_pool: RankPool, zero: int, precision: str
) -> None:
    kept, moved = (
        rank_pool.run(train_foreign, 2, zero=zero, precision=precision, place=place) for place in ("none", "cpu")
    )
    assert kept == moved
    assert len(kept[0]) == 2 * STEPS


@pytest.mark.slow
@pytest.mark.matrix  # a compiler runs for up to a minute
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_layers_have_the_bits_of_those_that_keep_their_activations(
    rank_pool: RankPool, configure: Configure, mode: str
) -> None:
    held = check_bits(rank_pool, configure, 2, train={"compile": True}, zero={"stage": 3}, recompute={"mode": mode})
    hidden = 4 * 48 * 32 * 4  # bytes of hidden states
    assert held[-1] >= {"none": 6, "selective": 4, "full": 1}[mode] * 2 * hidden, "of both layers"
