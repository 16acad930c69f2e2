"""The end of a step: sums over ranks, and an update only where loss and gradient are finite."""

import math
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tk.core.errors import TkError
from tk.tests.rank_pool import RankPool
from tk.train.config.sections import TrainSection
from tk.train.engine.optimizer_step import OptimizerStep
from tk.train.engine.training_engine import TrainingEngine
from tk.train.foreign.model_engine import initialize


def backward(factor: float) -> TrainingEngine:
    """An engine of one weight of 3 parameters after a backward pass: each one's gradient is `factor`."""
    model = initialize(nn.Linear(3, 1, bias=False), {"lr": 0.5, "grad_clip": 0.0, "weight_decay": 0.0})
    model.backward(model(torch.full((1, 3), factor)).sum())
    return model._engine


def agree() -> list[Any]:
    """This rank's sums: ranks have gradients of 1 and 3, of which the mean counts."""
    rank = dist.get_rank()
    step = OptimizerStep(backward(1.0 + 2 * rank), TrainSection(), before_update=lambda: None)
    sums = step.agree(torch.tensor(0.25 + rank, dtype=torch.float64), rank, 10.0)
    return [sums.loss, sums.grad_norm, *sums.others]


def test_ranks_agree_on_sums(rank_pool: RankPool) -> None:
    for found in rank_pool.run(agree, 2):
        assert found == pytest.approx([1.5, 2 * math.sqrt(3), 1.0, 20.0])


def test_readers_end_before_an_update() -> None:
    engine, calls = backward(1.0), []
    weight = engine.buffers.buckets[0].params
    before = weight.clone()
    step = OptimizerStep(
        engine,
        TrainSection(),
        before_update=lambda: calls.append(f"unchanged {torch.equal(weight, before)}"),
        on_phase=calls.append,
    )
    loss = torch.ones((), dtype=torch.float64)
    assert step.update(1, step.agree(loss), loss, lr=0.5)
    assert calls == ["reduce", "optimizer", "unchanged True"]
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_gradients_that_are_not_finite_update_nothing(on_nonfinite: Any) -> None:
    engine, calls = backward(math.inf), []
    before = engine.buffers.buckets[0].params.clone()
    options = TrainSection(on_nonfinite=on_nonfinite, max_skipped_steps=1)
    step = OptimizerStep(engine, options, before_update=lambda: calls.append("update"), on_phase=calls.append)
    loss = torch.ones((), dtype=torch.float64)
    sums = step.agree(loss)
    if on_nonfinite == "stop":
        with pytest.raises(TkError, match=r"Step 7: loss 1\.0, gradient norm"):
            step.update(7, sums, loss, lr=0.5)
    else:
        assert not step.update(7, sums, loss, lr=0.5)
        with pytest.raises(TkError, match="2 steps in a row"):
            step.update(8, sums, loss, lr=0.5)
    assert calls == ["reduce"]
    assert torch.equal(engine.buffers.buckets[0].params, before)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_weight_that_is_not_finite_is_named_before_any_gradient(zero: Literal[0, 3]) -> None:
    """No learning rate would help a model that has NaN from its initial weights on."""
    module = nn.Linear(3, 1)
    model = initialize(module, {"lr": 0.5}, zero=zero, precision="bf16")
    with model.full_parameters(), torch.no_grad():
        module.bias.fill_(math.nan)
    model.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum())
    with pytest.raises(TkError, match=r"weight bias, as held on rank 0, is not finite itself.* finite weights"):
        model.step()
