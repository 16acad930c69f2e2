"""A run from its first values to the step that it resumes, on the CPU or beside a pretended GPU."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tk.parallel import products, wide_sums
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.train.run_training import make_trainer
from tk.train.records import step_log
from tk.train.state.progress import StepResult

CPU = torch.device("cpu")
PAGEABLE = {
    "parallel/collectives.py gather_bytes": "messages of ranks, some bytes to KiB: host names, plans of reads, errors",
}


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
        return {"values": values, "copies": gpu.num_copies if gpu else 0}


def _train(config: dict[str, Any], device: torch.device) -> Iterator[Any]:
    """Yields what a run computes."""
    results: list[StepResult] = []
    trainer = make_trainer(config, device=device, on_step=lambda step, result: results.append(result))
    trainer.fit()
    yield from ((each.loss, each.grad_norm) for each in results)
    with trainer.engine.whole_parameters():
        yield from (float(each.params.double().sum()) for each in trainer.engine.buffers.buckets)


def sum_of_host() -> str:
    """Returns the error for a tensor of the host that is summed over GPUs."""
    with pretend_gpu(), pytest.raises(AssertionError) as raised:
        torch.distributed.all_reduce(torch.ones(1))
    return str(raised.value)
