"""A run from its first values to the step that it resumes, on the CPU or beside a pretended GPU."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.core.dtypes import Precision
from tk.parallel import products, wide_sums
from tk.parallel.torch_dtypes import torch_dtype
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.train.run_training import make_trainer
from tk.train.foreign.model_engine import initialize
from tk.train.records import step_log
from tk.train.state.progress import StepResult

CPU = torch.device("cpu")
PAGEABLE = {
    "parallel/collectives.py gather_bytes": "messages of ranks, some bytes to KiB: host names, plans of reads, errors",
}


class Counted(nn.Module):
    """Counts its calls in a buffer, whose values ranks agree on after each step."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x."""
        self.calls += 1
        return x


def walk(configs: list[dict[str, Any]], on_gpu: bool) -> dict[str, Any]:
    """Trains on this rank by one configuration after another, each to its last step, and resumes in between.

    Returns:
        "values": losses, norms and sums of whole parameters; "copies": how many to and from pinned memory there were.
    """
    values: list[Any] = []
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(products, "_WITHOUT_KERNELS", frozenset())  # CPU and GPU compute alike
        patch.setattr(wide_sums, "_torch_sums_in_fp32", lambda weight: True)
        patch.setattr(step_log, "peak_flops", lambda *arguments: 1e12)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        gpu = stack.enter_context(pretend_gpu(PAGEABLE)) if on_gpu else None
        for config in configs:
            values += _train(config, GPU if on_gpu else CPU)
            gc.collect()
            assert gpu is None or not gpu.memory.pinned, "memory of an engine that has ended is still pinned"
        return {"values": values, "copies": len(gpu.copies) if gpu else 0}


def _train(config: dict[str, Any], device: torch.device) -> Iterator[Any]:
    """Yields what a run computes."""
    results: list[StepResult] = []
    trainer = make_trainer(config, device=device, on_step=lambda step, result: results.append(result))
    trainer.fit()
    yield from (value for each in results for value in (each.loss, each.grad_norm))
    with trainer.engine.whole_parameters():
        yield from (float(each.params.double().sum()) for each in trainer.engine.buffers.buckets)


def walk_of_module(zero: int, precision: Precision, folder: str, on_gpu: bool) -> dict[str, Any]:
    """Trains a module under `initialize` with everything offloaded; saves, writes into parameters, and loads."""
    values: list[Any] = []
    with ExitStack() as stack:
        gpu = stack.enter_context(pretend_gpu(PAGEABLE)) if on_gpu else None
        for tier in ("cpu", "disk"):
            values += _train_module(zero, precision, tier, Path(folder), GPU if on_gpu else CPU)
            gc.collect()
            assert gpu is None or not gpu.memory.pinned, "memory of an engine that has ended is still pinned"
        return {"values": values, "copies": len(gpu.copies) if gpu else 0}


def _train_module(zero: int, precision: Precision, tier: str, folder: Path, device: torch.device) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), Counted(), *(nn.Linear(64, 64) for _ in range(2)), nn.Linear(64, 1))
    offload = {"optimizer": tier, "gradients": tier, "activations": "cpu", "folder": str(folder / "states")}
    engine = initialize(
        model.to(device),
        {"lr": 1e-2, "grad_clip": 0.1},
        zero=cast(Any, zero),
        precision=precision,
        accumulate=2,
        bucket_size=3000,
        offload=offload | ({"parameters": tier} if zero == 3 else {}),
    )
    dtype = torch_dtype(precision)
    if (folder / "run").exists():
        engine.load(folder / "run")
    for number in range(4):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
        loss = engine(rows.to(device)).float().square().mean()
        engine.backward(loss)
        engine.step()
        yield float(loss), engine.last_grad_norm
    with engine.full_parameters():
        for parameter in engine.module.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    engine.save(folder / "run")
    yield {name: each.double().sum().item() for name, each in engine.state_dict().items()}
    engine.close()


def sum_of_host() -> str:
    """Returns the error for a tensor of the host that is summed over GPUs."""
    with pretend_gpu(), pytest.raises(AssertionError) as raised:
        torch.distributed.all_reduce(torch.ones(1))
    return str(raised.value)
