"""A step on a GPU, as far as a machine without one can tell: where the host waits for the GPU, and where not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.parallel import grouped_products, products, wide_sums
from tk.parallel.torch_dtypes import torch_dtype
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train import initialize
from tk.train.run.trainer import Trainer
from tk.train.zero import adamw_rule
from tk.train.zero.flat_bucket import FlatBucket

EXPERTS = {"architecture": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
BIASED = {"architecture": "glm4_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LORA = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"], "dropout": 0.1}
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
    "fp16, pp": {"precision": {"params": "fp16"}, "parallel": {"pp": 2}, "zero": {"stage": 1}},
    "documents, cp": {"data": {"packing": "documents"}, "parallel": {"cp": 2}},
    "documents, ulysses": {"data": {"packing": "documents"}, "parallel": {"cp": 2, "cp_mode": "ulysses"}},
    "documents, compute again": {"data": {"packing": "documents"}, "recompute": {"mode": "full"}, "zero": {"stage": 3}},
    "LoRA": {"lora": LORA, "zero": {"stage": 3}},
    "LoRA, pp": {"lora": LORA, "parallel": {"pp": 2, "dp": 2}, "zero": {"stage": 1}},
    "layers as buckets": {"parallel": {"dp": 2}, "zero": {"stage": 2, "buckets": "layer"}},
    "bf16 states": {"optimizer": {"states": "bf16"}, "zero": {"stage": 1}},
}
CHOICE = ("experts, stage 3", "zb-h1", "LoRA")
MARKED = [pytest.param(name, marks=() if name in CHOICE else pytest.mark.matrix) for name in RUNS]
# The number of targets, by which each loss is divided, and the sums that say whether the step may update.
TWO = ["train/run/trainer.py _count_tokens: reads __int__", "train/engine/optimizer_step.py agree: reads tolist"]
PLAN = "model/experts/spreads.py sums: "


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


def most_exchanges_before_another(config: dict[str, Any]) -> int:
    """Trains a step on this rank; returns the most exchanges under way when the next one starts."""
    counts: list[int] = []
    with gpu_and_trainer(config) as (_, trainer):
        exchange = trainer.engine.exchange
        start = exchange._start_exchange

        def started(bucket: FlatBucket) -> Any:
            counts.append(len(exchange._in_flight))
            return start(bucket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "_start_exchange", started)
            trainer.step()
        assert len(counts) > 3
        return max(counts)


@pytest.mark.matrix
def test_backward_awaits_exchanges_only_where_that_frees_memory(rank_pool: RankPool, configure: Configure) -> None:
    found = {}
    for stage in (1, 2):
        config = configure(parallel={"dp": 2}, precision={"params": "bf16"}, zero={"stage": stage})
        (found[stage], other) = rank_pool.run(most_exchanges_before_another, 2, config=config)
        assert found[stage] == other
    assert found[1] > found[2] == 1, "two are under way at stage 2, the new one included"


@pytest.mark.matrix
@pytest.mark.parametrize(("mode", "passes"), [("none", 1), ("full", 2)])
def test_an_exchange_of_tokens_waits_for_its_plan_alone(
    rank_pool: RankPool, configure: Configure, mode: str, passes: int
) -> None:
    """The sizes of messages depend on the choice of experts: the host reads them, once in each layer that exchanges.

    A layer that is computed again reads them again. All else that the host knows goes to the GPU without a wait.
    """
    sections = {"parallel": {"dp": 2, "ep": 2}, "precision": {"params": "bf16"}, "recompute": {"mode": mode}}
    config = configure(model=EXPERTS, train={"steps": 3, "global_batch_size": 8}, **sections)
    for waits in rank_pool.run(waits_of_a_step, 2, config=config):
        assert [each for each in waits if not each.startswith(PLAN)] == TWO
        of_plans = [each for each in waits if each.startswith(PLAN) and "waits for its end" in each]
        assert len(of_plans) == passes * 2 * 2, "two layers, two micro-batches"


def waits_of_an_engine(zero: int, precision: Any) -> tuple[list[str], list[str]]:
    """Makes steps of two micro-batches under `initialize`; returns the waits of the second's passes, and of its end."""
    torch.manual_seed(0)
    with pretend_gpu() as gpu:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(GPU)
        engine = initialize(model, {"grad_clip": 0.1}, zero=cast(Any, zero), precision=precision, accumulate=2)
        rows = torch.randn(4, 8).to(torch_dtype(precision)).to(GPU)
        found: list[list[str]] = []
        for _ in range(2):
            before = len(gpu.waits)
            for _ in range(2):
                engine.backward(engine(rows).float().square().mean())
            passed = len(gpu.waits)
            engine.step()
            found = [gpu.waits[before:passed], gpu.waits[passed:]]
        return found[0], found[1]


@pytest.mark.parametrize(
    ("zero", "precision"),
    [(2, "bf16"), *(pytest.param(*row, marks=pytest.mark.matrix) for row in ((0, "fp32"), (1, "fp16"), (3, "bf16")))],
)
def test_an_engine_waits_at_the_end_of_a_step_alone(rank_pool: RankPool, zero: int, precision: str) -> None:
    for passes, end in rank_pool.run(waits_of_an_engine, 2, zero=zero, precision=precision):
        assert passes == []
        assert len(end) <= 2, end
