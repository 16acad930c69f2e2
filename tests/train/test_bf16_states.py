"""Runs with bf16 moments: the same bits at every ZeRO stage and tier, also if these change midway."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.tests.train.test_offload import same_bits

pytestmark = [pytest.mark.timeout(600)]

Case = tuple[int, int, str, str]  # stages before and after a resume, the tier after it, precision
CASES: list[Case] = [(0, 3, "disk", "bf16")]
MATRIX: list[Case] = [  # all pairs of stages, with each tier and precision at each stage
    (before, after, ("none", "cpu", "disk")[(before + after) % 3], ("fp32", "bf16")[before // 2 ^ after % 2])
    for before, after in product(range(4), range(4))
]


def train(
    rank_pool: RankPool, configure: Configure, run: str, steps: int, zero: int, tier: str, params: str, **more: Any
) -> dict[str, Any]:
    config = configure(
        run,
        # Stages sum micro-batches, and the squares of a norm, in another order: one micro-batch, and no clipping.
        train={"steps": steps, "seed": 3, "global_batch_size": 4, "micro_batch_size": 2},
        optimizer={
            "states": "bf16",
            "grad_clip": 0.0,
            "schedule": "constant",
            "warmup_steps": 0,
            "betas": [0.9, 0.999],
            **more,
        },
        precision={"params": params},
        parallel={"dp": 2},
        zero={"stage": zero},
        offload={"optimizer": tier},
        model={"tie_word_embeddings": True},
    )
    results: list[dict[str, Any]] = rank_pool.run(run_training, 2, config=config)
    assert results[0] == results[1], "ranks must report the same bits"
    return results[0]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MATRIX, marks=pytest.mark.matrix)], ids=["chosen", "all"])
def test_every_stage_gives_the_same_bits_also_after_a_resume_at_another(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, cases: list[Case]
) -> None:
    """Two ranks sum gradients alike at every stage, so that they are the same gradients."""
    losses = {}
    for params in dict.fromkeys(params for *_, params in cases):
        losses[params] = train(rank_pool, configure, f"whole {params}", 4, 1, "none", params)["loss"]
    for number, (before, after, tier, params) in enumerate(cases):
        first = train(rank_pool, configure, f"run {number}", 2, before, "none", params)
        then = train(rank_pool, configure, f"run {number}", 4, after, tier, params)
        assert first["loss"] + then["loss"] == losses[params], (before, after, tier, params)
        found, expected = (Checkpoint.open(tmp_path / run) for run in (f"run {number}", f"whole {params}"))
        same_bits(found, expected)
        assert {found.tensors[name].slots["exp_avg_sq"] for name in found.tensors} == {"BF16"}


@pytest.mark.matrix
def test_losses_are_near_those_of_fp32_moments_and_a_checkpoint_goes_on_with_either(
    rank_pool: RankPool, configure: Configure
) -> None:
    expected = train(rank_pool, configure, "wide", 12, 1, "none", "fp32", states="fp32")["loss"]
    found = train(rank_pool, configure, "narrow", 6, 1, "none", "fp32")["loss"]
    found += train(rank_pool, configure, "narrow", 9, 1, "none", "fp32", states="fp32")["loss"]
    found += train(rank_pool, configure, "narrow", 12, 1, "none", "fp32")["loss"]
    np.testing.assert_allclose(found, expected, rtol=3e-3)
    assert found != expected
    assert expected[-1] < 0.9 * expected[0]
