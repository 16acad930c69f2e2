"""Nested backward passes: a parameter then has several gradients in one pass, and all of them are counted."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tk.core.errors import ConfigError
from tk.tests.rank_pool import RankPool
from tk.tests.train.zero.one_process import OPTIMIZER, train_alone
from tk.train import initialize

STEPS, ACCUMULATE = 2, 2


class Checkpointed(nn.Module):
    """A layer that is used in three places, tied embeddings, and parameters inside and outside of checkpoints."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.own = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.shared = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in [*self.own, *self.own]:
            x = checkpoint(partial(self._block, block), x, use_reentrant=self.use_reentrant)
        logits = self.head(checkpoint(self.shared, x * self.scale, use_reentrant=self.use_reentrant))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def _block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(block(x)) @ self.embed.weight.T @ self.embed.weight) * self.scale + x


def _tokens(step: int, rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch))


def train_checkpointed(variants: list[tuple[Any, int]]) -> list[list[float]]:
    """Returns the gradient norms for each ZeRO stage and bucket size."""
    rank = torch.distributed.get_rank()
    found = []
    for zero, bucket_size in variants:
        module = Checkpointed(use_reentrant=True)
        engine = initialize(module, OPTIMIZER, zero=zero, accumulate=ACCUMULATE, bucket_size=bucket_size)
        norms = []
        for step in range(STEPS):
            for micro_batch in range(ACCUMULATE):
                engine.backward(engine(_tokens(step, rank, micro_batch)))
                engine.step()
            norms.append(engine.last_grad_norm)
        found.append(norms)
    return found


def test_reentrant_checkpoints_with_shared_parameters_at_every_stage(rank_pool: RankPool) -> None:
    def loss(module: nn.Module, **place: int) -> torch.Tensor:
        found: torch.Tensor = module(_tokens(**place))
        return found

    every = [(rank, micro_batch) for rank in range(2) for micro_batch in range(ACCUMULATE)]
    steps = [[partial(loss, step=step, rank=rank, micro_batch=micro) for rank, micro in every] for step in range(STEPS)]
    expected = train_alone(Checkpointed(use_reentrant=False), steps)
    variants = [(zero, bucket_size) for zero in range(4) for bucket_size in (8, 2**20)]
    for found in rank_pool.run(train_checkpointed, 2, variants=variants):
        for variant, norms in zip(variants, found, strict=True):
            np.testing.assert_allclose(norms, expected["norms"], rtol=1e-5, err_msg=f"stage, bucket size = {variant}")


class Penalized(nn.Module):
    """A loss that contains a gradient, so that forward runs a backward, and backward differentiates that again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = self.layers(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        loss: torch.Tensor = y + (slope**2).sum()
        return loss


@pytest.mark.parametrize("zero", [0, 3])
def test_a_gradient_inside_the_loss(zero: Any) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    expected = train_alone(Penalized(), [[lambda module: module(x)]] * 2)
    engine = initialize(Penalized(), OPTIMIZER, zero=zero, bucket_size=8)
    for norm in expected["norms"]:
        engine.backward(engine(x))
        engine.step()
        assert engine.last_grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_micro_batch_has_one_backward(zero: Any) -> None:
    """A second one used to be dropped at stages 0 and 1, and to be counted at stages 2 and 3."""
    module = nn.Sequential(nn.Linear(2, 2))
    engine = initialize(module, OPTIMIZER, zero=zero)
    x = torch.ones(1, 2)
    engine.backward(engine(x).sum())
    other = engine(x).sum()
    with pytest.raises(ConfigError, match=r"once more than accumulate = 1 .*backward\(a \+ b\)"):
        engine.backward(other)
    assert engine.step()
    alone = train_alone(nn.Sequential(nn.Linear(2, 2)), [[lambda module: module(x).sum()]])
    assert engine.last_grad_norm == pytest.approx(alone["norms"][0], rel=1e-6)
    engine.backward(engine(x).sum() + engine(x).sum())
    assert engine.step()


@pytest.mark.parametrize("zero", [0, 2])
def test_a_backward_without_the_engine_is_refused(zero: Any) -> None:
    """Its gradients would not be averaged, and step() would do nothing."""
    engine = initialize(nn.Sequential(nn.Linear(2, 2)), OPTIMIZER, zero=zero)
    with pytest.raises(
        ConfigError, match=r"0\.(weight|bias) got a gradient outside of its engine's backward.*call engine\.backward"
    ):
        engine(torch.ones(1, 2)).sum().backward()


class SideLosses(nn.Module):
    """Blocks that keep a part of the loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(KeepsSideLoss() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        loss: torch.Tensor = (x**2).mean()
        for block in self.blocks:
            assert isinstance(block, KeepsSideLoss)
            loss = loss + block.side_loss
        return loss


class KeepsSideLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.side_loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.side_loss = (self.linear.weight**2).sum() + self.linear(x.detach() + 1).sin().sum()
        return y


def test_values_that_a_block_keeps_as_attributes() -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    expected = train_alone(SideLosses(), [[lambda module: module(x)]] * 2)
    engine = initialize(SideLosses(), OPTIMIZER, zero=3, bucket_size=8)
    for norm in expected["norms"]:
        engine.backward(engine(x))
        engine.step()
        assert engine.last_grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_loss_of_parameters_themselves() -> None:
    """The parameters are read inside `full_parameters`, and backward needs them after it."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    alone = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    alone.load_state_dict(module.state_dict())
    weights = ["0.weight", "1.weight"]

    def loss(of: nn.Module) -> torch.Tensor:
        a, b = (of.get_parameter(name) for name in weights)
        return (a @ b.T).square().sum()

    expected = train_alone(alone, [[loss]])
    engine = initialize(module, OPTIMIZER, zero=3)
    with engine.full_parameters():
        total = loss(module)
    engine.backward(total)
    engine.step()
    assert engine.last_grad_norm == pytest.approx(expected["norms"][0], rel=1e-5)
