"""The executor has the gradients of PyTorch's own pipeline over the same stages."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from tk.tests.rank_pool import RankPool
from tk.tests.train.pipeline.toy_model import ToyStage, build, executor_of, gradients, loss_sum, whole_group


class _ForTorch(nn.Module):
    """A stage in the form that PyTorch's pipeline needs: without micro-batch index, and without the loss."""

    def __init__(self, stage: ToyStage) -> None:
        super().__init__()
        self.layers = stage.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def check_equals_torch(name: str, virtual_stages: int, count: int) -> None:
    """PyTorch's pipeline over the same stages gives the same gradients."""
    pp = whole_group()
    executor, mine = executor_of(name, virtual_stages, count, pp)
    loss = executor.run()
    num_stages = executor.schedule.num_stages
    whole, _ = build(num_stages, count)
    inputs, targets = whole[0].inputs, whole[-1].targets
    assert inputs is not None
    assert targets is not None
    theirs = [PipelineStage(_ForTorch(whole[index]), index, num_stages, torch.device("cpu")) for index in mine]
    schedule: Any = (Schedule1F1B if virtual_stages == 1 else ScheduleInterleaved1F1B)(
        theirs[0] if virtual_stages == 1 else theirs,  # type: ignore[arg-type]
        count,
        loss_fn=lambda prediction, target: loss_sum(prediction, target) / len(targets),
        scale_grads=False,
    )
    losses: list[torch.Tensor] = []
    schedule.step(*([inputs] if pp.rank == 0 else []), target=targets, losses=losses)
    for index, stage in mine.items():
        for grad, other in zip(gradients(stage), gradients(whole[index]), strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-7)
    if num_stages - 1 in mine:
        torch.testing.assert_close(loss.float(), torch.stack(losses).sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "virtual_stages", "count", "pp"),
    [
        ("1f1b", 1, 7, 2),
        ("1f1b", 1, 4, 4),
        ("interleaved", 2, 8, 4),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (("1f1b", 1, 4, 2), ("1f1b", 1, 7, 4), ("interleaved", 2, 8, 2))
        ),
    ],
)
def test_pipeline_equals_torchs(rank_pool: RankPool, name: str, virtual_stages: int, count: int, pp: int) -> None:
    rank_pool.run(check_equals_torch, pp, name=name, virtual_stages=virtual_stages, count=count)
