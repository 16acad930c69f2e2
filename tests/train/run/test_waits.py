"""A step on a GPU, as far as a machine without one can tell: where the host waits for the GPU, and where not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.parallel import grouped_products, products, wide_sums
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.run.trainer import Trainer
from tk.train.zero import adamw_rule

EXPERTS = {"architecture": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
BIASED = {"architecture": "glm4_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": {"params": "fp32"}},
    "fp16": {"precision": {"params": "fp16"}},
    "stage 1": {"zero": {"stage": 1}},
    "stage 2": {"zero": {"stage": 2}},
    "experts, stage 3": {"model": EXPERTS, "zero": {"stage": 3}, "recompute": {"mode": "selective"}},
    "experts with biases": {"model": BIASED, "train": {"router_bias_update_rate": 0.01}},
    "z-loss": {"model": EXPERTS, "train": {"router_z_loss_coef": 0.01}},
    "documents": {"data": {"packing": "documents"}, "recompute": {"mode": "full"}},
    "window": {"model": {"architecture": "mistral", "sliding_window": 5}},
    "tp": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "cp": {"parallel": {"cp": 2}, "zero": {"stage": 3}},
    "dp, stage 0": {"parallel": {"dp": 2}},
    "dp, stage 3": {"parallel": {"dp": 2}, "zero": {"stage": 3}},
    "gpipe": {"parallel": {"pp": 2, "schedule": "gpipe"}},
    "1f1b, dp": {"parallel": {"pp": 2, "dp": 2, "schedule": "1f1b"}, "zero": {"stage": 2}},
    "interleaved": {
        "model": {"num_hidden_layers": 4},
        "parallel": {"pp": 2, "schedule": "interleaved", "num_virtual_stages": 2},
    },
    "zb-h1": {"parallel": {"pp": 2, "schedule": "zb-h1"}},
    "experts, tp": {"model": EXPERTS, "parallel": {"tp": 2}},
}
CHOICE = ("experts, stage 3", "zb-h1")
MARKED = [pytest.param(name, marks=() if name in CHOICE else pytest.mark.matrix) for name in RUNS]
# The number of targets, by which each loss is divided, and the sums that say whether the step may update.
TWO = ["train/run/trainer.py _count_tokens: reads __int__", "train/engine/optimizer_step.py agree: reads tolist"]
EXCHANGE = ("model/experts/spreads.py sums: ", "model/experts/spreads.py _round: ", "parallel/row_groups.py of: ")


@contextmanager
def gpu_and_trainer(config: dict[str, Any]) -> Iterator[tuple[Any, Trainer]]:
    """A pretended GPU, with CUDA's choices, and a trainer on it."""
    with pytest.MonkeyPatch.context() as patch, pretend_gpu() as gpu, sdpa_kernel(SDPBackend.MATH):
        patch.setattr(products, "_WITHOUT_KERNELS", frozenset())
        patch.setattr(wide_sums, "_torch_sums_in_fp32", lambda weight: True)
        patch.setattr(adamw_rule, "native_adamw", lambda: None)
        patch.setattr(grouped_products, "_has_kernel", lambda device, dtype: True)
        yield gpu, make_trainer(config, device=GPU)


def waits_of_a_step(config: dict[str, Any]) -> list[str]:
    """Trains two steps on this rank; returns what the host waited for in the second."""
    with gpu_and_trainer(config) as (gpu, trainer):
        trainer.step()
        before = len(gpu.waits)
        trainer.step()
        return gpu.waits[before:]  # type: ignore[no-any-return]


def copies_of_a_step(config: dict[str, Any]) -> tuple[int, list[str]]:
    """Trains a step on this rank; returns the number of copies from the host, and who made scalars of the update."""
    with gpu_and_trainer(config) as (gpu, trainer):
        copies, scalars = len(gpu.copies), len(gpu.scalars)
        trainer.step()
        return len(gpu.copies) - copies, [each for each in gpu.scalars[scalars:] if "train/zero" in each]


def sections_of(name: str) -> dict[str, Any]:
    """Returns the sections of a run's configuration."""
    run = RUNS[name]
    usual = {"precision": {"params": "bf16"}, "optimizer": {"grad_clip": 0.01}}
    return {**usual, **run, "train": {"steps": 3, **run.get("train", {})}}


@pytest.mark.parametrize("name", MARKED)
def test_the_host_waits_twice_in_a_step(rank_pool: RankPool, configure: Configure, name: str) -> None:
    sections = sections_of(name)
    parallel = sections.get("parallel", {})
    ranks = math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    for waits in rank_pool.run(waits_of_a_step, ranks, config=configure(**sections)):
        assert waits == TWO


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_step_copies_each_micro_batch_once_and_makes_two_scalars_at_most(configure: Configure, states: str) -> None:
    sections = {"optimizer": {"states": states, "grad_clip": 0.01}, "precision": {"params": "bf16"}}
    config = configure(train={"steps": 3}, zero={"bucket_size": 900}, **sections)
    copies, scalars = copies_of_a_step(config)
    assert copies == 3, "the number of micro-batches"
    assert 1 <= len(scalars) <= 2, "there are more buckets"


@pytest.mark.matrix
def test_an_exchange_of_tokens_waits_for_its_plan_alone(rank_pool: RankPool, configure: Configure) -> None:
    """The sizes of messages depend on the choice of experts: the host reads them, and sends the order of tokens."""
    config = configure(model=EXPERTS, parallel={"dp": 2, "ep": 2}, precision={"params": "bf16"}, train={"steps": 3})
    for waits in rank_pool.run(waits_of_a_step, 2, config=config):
        assert [each for each in waits if not each.startswith(EXCHANGE)] == TWO
        assert len(waits) > len(TWO)
