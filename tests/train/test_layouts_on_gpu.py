"""Layouts on GPUs: ranks that share one over gloo, and ranks with one each over NCCL, train as one process does."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.tests.train.test_cuda import logged, train

pytestmark = pytest.mark.gpu
EXPERTS = {"architecture": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp, stage 0": {"parallel": {"dp": 2}},
    "dp, stage 3": {"parallel": {"dp": 2}, "zero": {"stage": 3}},
    "tp": {"parallel": {"tp": 2}},
    "tp, sequence parallel, dp, stage 2": {
        "parallel": {"tp": 2, "dp": 2, "sequence_parallel": True},
        "zero": {"stage": 2},
    },
    "pp, 1f1b": {"parallel": {"pp": 2, "schedule": "1f1b"}},
    "pp, zb-h1, tp": {"parallel": {"pp": 2, "tp": 2, "schedule": "zb-h1"}},
    "cp": {"parallel": {"cp": 2}, "zero": {"stage": 1}},
    "ep": {"parallel": {"dp": 2, "ep": 2}, "model": EXPERTS},
}


def losses_of(config: dict[str, Any]) -> list[float]:
    """Trains three steps on this rank, on the first GPU; returns losses and gradient norms."""
    trainer = make_trainer(config, device=torch.device("cuda", 0))
    return [value for result in (trainer.step() for _ in range(3)) for value in (result.loss, result.grad_norm)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_share_a_gpu_train_as_one_process(rank_pool: RankPool, configure: Configure, name: str) -> None:
    sections = LAYOUTS[name]
    ranks = math.prod(sections["parallel"].get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    whole = {name: section for name, section in sections.items() if name == "model"}
    (expected,) = rank_pool.run(losses_of, 1, config=configure("whole", train={"steps": 3}, **whole))
    for found in rank_pool.run(losses_of, ranks, config=configure("ranks", train={"steps": 3}, **sections)):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_over_nccl_train_as_one_process(
    configure: Configure, write_toml: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    sections = LAYOUTS[name]
    ranks = math.prod(sections["parallel"].get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    if ranks > torch.cuda.device_count():
        pytest.skip(f"the layout has {ranks} ranks, and the machine fewer GPUs")
    whole = {name: section for name, section in sections.items() if name == "model"}
    train(write_toml(configure("whole", **whole), "whole.toml"), None)
    train(write_toml(configure("ranks", **sections), "ranks.toml"), None, "--nproc", str(ranks))
    expected, found = logged(tmp_path / "whole"), logged(tmp_path / "ranks")
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-4)
