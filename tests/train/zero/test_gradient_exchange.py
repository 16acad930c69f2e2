"""The gradient exchange: with every stage and shard size, sums equal the gradients of one process."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tk.core.tensors import TensorSpec
from tk.tests.rank_pool import RankPool
from tk.tests.train.zero.one_process import OPTIMIZER, train_alone
from tk.tests.train.zero.small_buffers import make_buffers
from tk.train import initialize
from tk.train.zero.gradient_exchange import GradientExchange

STEPS, WORLD = 2, 4
VARIANTS: list[tuple[Any, int]] = [(0, 0), *((zero, shard_size) for zero in (1, 2, 3) for shard_size in (1, 2, 4))]


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _rows(step: int, rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch))


def _loss(module: Any, rows: torch.Tensor) -> torch.Tensor:
    return (module(rows) ** 2).mean()  # type: ignore[no-any-return]


def train_every_variant() -> list[list[float]]:
    """Returns the gradient norms of each of VARIANTS."""
    rank = torch.distributed.get_rank()
    found = []
    for zero, shard_size in VARIANTS:
        engine = initialize(_module(), OPTIMIZER, zero=zero, shard_size=shard_size, accumulate=2, bucket_size=16)
        norms = []
        for step in range(STEPS):
            for micro_batch in range(2):
                engine.backward(_loss(engine, _rows(step, rank, micro_batch)))
                engine.step()
            norms.append(engine.last_grad_norm)
        found.append(norms)
    return found


def test_every_stage_and_shard_size_sums_over_all_ranks(rank_pool: RankPool) -> None:
    steps = [
        [partial(_loss, rows=_rows(step, rank, micro_batch)) for rank in range(WORLD) for micro_batch in range(2)]
        for step in range(STEPS)
    ]
    expected = train_alone(_module(), steps)
    for found in rank_pool.run(train_every_variant, WORLD):
        for variant, norms in zip(VARIANTS, found, strict=True):
            np.testing.assert_allclose(norms, expected["norms"], rtol=1e-5, err_msg=f"stage, shard_size = {variant}")


def test_a_gradient_is_added_without_a_copy_of_it_in_fp32() -> None:
    name, shape = "table.weight", (2**11, 2**10)
    module = nn.ModuleDict({"table": nn.Embedding(*shape)})
    buffers = make_buffers(module, 0, dtype=torch.bfloat16, table=(TensorSpec(name, shape, None, 0),))
    exchange = GradientExchange(buffers, sequence_parallel=False, overlap=False)
    (bucket,) = buffers.buckets
    exchange.begin_backward(last=True)
    rows = torch.arange(shape[0]).unsqueeze(1).bfloat16()
    loss = (module["table"](torch.arange(shape[0])) * rows).sum()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        loss.backward()
    assert bucket.grads is not None
    assert torch.equal(bucket.grads[: shape[0] * shape[1]].view(shape), rows.float().expand(shape))
    recorded: Any = traced.profiler
    allocated = [event.nbytes() for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    whole = shape[0] * shape[1]
    assert 2 * whole <= max(allocated) < 4 * whole, "the gradient itself is in bf16"
