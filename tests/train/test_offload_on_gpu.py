"""Offload beside a GPU, as far as a machine without one can show it.

The GPU is a pretended one: operations on tensors of GPU and host, copies of memory that is not pinned, and addresses of
the GPU in native code are errors, and a copy that is not awaited has no result. A run with everything offloaded makes
none of them, and has the bits of one on the CPU.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.offload_walk import PAGEABLE, sum_of_host, walk, walk_of_module
from tk.tests.train.run_training import make_trainer
from tk.tests.train.test_offload import same_bits
from tk.train.zero.gradient_sum import StoredSum
from tk.train.zero.states import pinned_copies
from tk.train.zero.states.host_transfer import HostTransfer
from tk.train.zero.states.memory_states import MemoryStates

pytestmark = [pytest.mark.timeout(600)]

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 1},
    {"dp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "dp": 2, "schedule": "zb-h1"},
]
CASES: list[tuple[dict[str, Any], int, str]] = [({"dp": 2}, 3, "bf16")]
FROZEN = ["model.embed_tokens*"]
DTYPES = ("fp32", "bf16", "fp16")
MATRIX = [(layout, zero, DTYPES[(number + zero) % 3]) for number, layout in enumerate(LAYOUTS) for zero in range(4)]
MATRIX.append(({"dp": 1}, 0, "fp16"))


def everything(tier: str, zero: int) -> dict[str, Any]:
    """Returns the options that move all model states to a tier."""
    return {"optimizer": tier, "gradients": tier, "activations": "cpu"} | ({"parameters": tier} if zero == 3 else {})


@pytest.mark.parametrize(
    ("parallel", "zero", "precision"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX if case not in CASES)],
)
def test_everything_offloaded_mixes_no_devices_and_copies_pinned_memory_only(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, parallel: dict[str, Any], zero: int, precision: str
) -> None:
    """Trains with accumulation and clipping, evaluates, saves in the background and in place, and resumes."""
    found, tiers = {}, ("cpu", "disk") if zero % 2 else ("disk", "cpu")
    ranks = math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "dp"))
    train = {"global_batch_size": 5, "eval_every": 2, "eval_rows": 2, "freeze": FROZEN if zero == 2 else []}
    for name in ("cpu", "gpu"):
        configs = [
            configure(
                name,
                train=train | {"steps": steps},
                optimizer={"grad_clip": 0.01, "schedule": "constant", "warmup_steps": 0},
                precision={"params": precision, "initial_loss_scale": 2.0**24},
                parallel=parallel,
                zero={"stage": zero},
                offload=everything(tier, zero),
                checkpoint={"every": 1},
            )
            for steps, tier in zip((1, 3), tiers, strict=True)
        ]
        found[name] = rank_pool.run(walk, ranks, configs=configs, on_gpu=name == "gpu")
    assert all(each["copies"] > 100 for each in found["gpu"])
    ours, theirs = ([each["values"] for each in found[name]] for name in ("gpu", "cpu"))
    if ranks > 2:  # the order of a sum over more ranks is that of its collective
        assert ours == [pytest.approx(each, rel=1e-5, nan_ok=True) for each in theirs]
        return
    assert ours == theirs
    for step in range(1, 4):
        same_bits(*(Checkpoint.open(tmp_path / name / f"step-{step:08d}") for name in found))


@pytest.mark.parametrize(
    ("ranks", "zero", "precision"),
    [
        (1, 2, "bf16"),
        *(
            pytest.param(ranks, zero, DTYPES[(ranks + zero) % 3], marks=pytest.mark.matrix)
            for ranks in (1, 2)
            for zero in range(4)
        ),
    ],
)
def test_a_module_under_initialize_copies_pinned_memory_only(
    rank_pool: RankPool, tmp_path: Path, ranks: int, zero: int, precision: str
) -> None:
    """Trains, writes into parameters, saves in the background, and loads the step at another tier."""
    found = {}
    for name in ("cpu", "gpu"):
        options = {"zero": zero, "precision": precision, "folder": str(tmp_path / name), "on_gpu": name == "gpu"}
        found[name] = rank_pool.run(walk_of_module, ranks, **options)
    assert all(each["copies"] > 20 for each in found["gpu"])
    assert [each["values"] for each in found["gpu"]] == [each["values"] for each in found["cpu"]]


def one_step(config: dict[str, Any]) -> None:
    """Makes one step on the GPU, to the end of its update."""
    trainer = make_trainer(config, device=GPU)
    trainer.step()
    trainer.engine.optimizer.finish()


def pageable(transfer: HostTransfer, name: str, values: torch.Tensor) -> torch.Tensor:
    return values.cpu()


def untouched(transfer: HostTransfer, name: str, values: torch.Tensor) -> torch.Tensor:
    return values


def not_moved(kept: StoredSum, part: torch.Tensor) -> None:
    with kept._store.changing([kept._bucket]) as ranges:
        for each in ranges:
            each.slots["gradient"].add_(part[each.begin : each.end])


def not_awaited(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)  # and no event


def converting(states: MemoryStates, slot: str, bucket: int, begin: int, values: torch.Tensor) -> None:
    states.read(slot, bucket, begin, begin + values.numel()).copy_(values)


DEFECTS: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "a copy to memory that is not pinned": (HostTransfer, "down", pageable, "sharded_adamw.py _update: .* not pinned"),
    "memory of the GPU in native code": (HostTransfer, "down", untouched, r"native code gets \['bf16'\]"),
    "a sum of GPU and host": (StoredSum, "add", not_moved, r"add_.*( has tensors of \{device|two different devices)"),
    "memory that changes while it is copied": (
        pinned_copies,
        "start_copy_up",
        not_awaited,
        "changed while it was copied",
    ),
    "a copy that converts on the host": (MemoryStates, "write", converting, "converts on its way"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_seen(configure: Configure, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    owner, name, planted, message = DEFECTS[defect]
    monkeypatch.setattr(owner, name, planted)
    config = configure(
        precision={"params": "bf16"},
        zero={"stage": 2},
        offload=everything("cpu", 2),
        train={"global_batch_size": 2, "micro_batch_size": 1},
    )
    with pretend_gpu(PAGEABLE), pytest.raises((AssertionError, RuntimeError), match=message):
        one_step(config)


def test_a_copy_has_no_result_before_it_is_awaited() -> None:
    with pretend_gpu() as gpu:
        there, here = torch.ones(2, device=GPU), torch.zeros(2)
        here.copy_(there, non_blocking=True)
        assert here.isnan().all()
        gpu.memory.synchronize()
        assert here.tolist() == [1.0, 1.0]


def test_nccl_refuses_memory_of_the_host(rank_pool: RankPool) -> None:
    assert rank_pool.run(sum_of_host, 2) == ["c10d.allreduce_.default over a group of NCCL has tensors of the host"] * 2
