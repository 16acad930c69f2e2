"""ZeRO stage 3 with blocks in any order: the gradients are right, and ranks whose orders differ get an error."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tk.core.errors import TkError
from tk.tests.rank_pool import RankPool
from tk.tests.train.zero.one_process import OPTIMIZER, train_alone
from tk.train import initialize

ORDERS = {"another order": [2, 0, 3, 1], "skipped by all": [0, 3], "called twice": [0, 1, 1, 2, 0]}


class Blocks(nn.Module):
    """Four blocks that are called in a given order, and a layer before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.first(x)
        for index in order:
            x = x + torch.tanh(self.blocks[index](x))
        return (x**2).mean()


def _rows(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))


def train_in_orders(orders: list[list[int]], gather_together: list[str]) -> list[list[float]]:
    """Returns gradient norms and weights after two steps.

    Args:
        orders: the order of blocks of each rank; the last one is also for all further ranks.
        gather_together: see `initialize`.
    """
    rank = torch.distributed.get_rank()
    module = Blocks()
    engine = initialize(module, OPTIMIZER, zero=3, bucket_size=8, gather_together=gather_together)
    norms = []
    for _ in range(2):
        engine.backward(engine((_rows(rank), orders[min(rank, len(orders) - 1)])))
        engine.step()
        norms.append(engine.last_grad_norm)
    return [norms, *(value.flatten().tolist() for value in engine.state_dict().values())]


def _expected(orders: list[list[int]]) -> list[list[float]]:
    def loss(module: nn.Module, rank: int) -> torch.Tensor:
        found: torch.Tensor = module(_rows(rank), orders[min(rank, len(orders) - 1)])
        return found

    return list(train_alone(Blocks(), [[partial(loss, rank=rank) for rank in range(2)]] * 2).values())


@pytest.mark.parametrize("name", ORDERS)
def test_any_order_that_all_ranks_have(rank_pool: RankPool, name: str) -> None:
    orders = [ORDERS[name]]
    for found in rank_pool.run(train_in_orders, 2, orders=orders, gather_together=[]):
        for mine, alone in zip(found, _expected(orders), strict=True):
            np.testing.assert_allclose(mine, alone, rtol=1e-4, atol=1e-6)


def test_ranks_may_differ_in_blocks_that_are_gathered_together(rank_pool: RankPool) -> None:
    """Layer drop: a skipped block has no gradient on that rank, and ranks complete their buckets at different times."""
    orders = [[0, 1, 2, 3], [3, 0]]
    for found in rank_pool.run(train_in_orders, 2, orders=orders, gather_together=["blocks.[123]"]):
        for mine, alone in zip(found, _expected(orders), strict=True):
            np.testing.assert_allclose(mine, alone, rtol=1e-4, atol=1e-6)


DIFFERENT = {
    "another": ([[0, 3, 1], [0, 2, 1]], r"rank 0 gathers blocks\.\d for a (for|back)ward.*rank 1 gathers blocks\.\d"),
    "fewer": ([[0, 1, 2], [0]], r"rank 0 gathers blocks\.2 for a forward.*rank 1 has ended a forward pass"),
}


def differ(orders: list[list[int]]) -> str:
    """Returns the error that a rank gets; its peers would wait for it longer than any test."""
    rank = torch.distributed.get_rank()
    engine = initialize(Blocks(), OPTIMIZER, zero=3, timeout_seconds=3600)
    try:
        engine.backward(engine((_rows(rank), orders[rank])))
        engine.step()
    except TkError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_orders_get_an_error_that_names_their_acts(rank_pool: RankPool, name: str) -> None:
    """Without a check, a rank would compute with another block's values, or wait for ever."""
    orders, message = DIFFERENT[name]
    for error in rank_pool.run(differ, 2, orders=orders):
        assert re.search(message + ".*gather_together", error), error


class Experts(nn.Module):
    """Blocks that all ranks call, each with two experts of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        for layer, expert in zip(self.layers, use, strict=True):
            x = x + layer(x, expert)
        return (x**2).mean()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        return torch.tanh((self.a, self.b)[use](x))


def train_experts(zero: Any, uses: list[list[int]]) -> list[float]:
    """Returns the gradient norms of two steps."""
    rank = torch.distributed.get_rank()
    engine = initialize(Experts(), OPTIMIZER, zero=zero, bucket_size=8)
    norms = []
    for _ in range(2):
        engine.backward(engine((_rows(rank), uses[rank])))
        engine.step()
        norms.append(engine.last_grad_norm)
    return norms


def test_experts_that_are_unused_on_some_ranks(rank_pool: RankPool) -> None:
    """Buckets are complete at different times and are exchanged between gathers, in one order on all ranks."""
    uses = [[0, 1, 0], [1, 0, 0]]

    def loss(module: nn.Module, rank: int) -> torch.Tensor:
        found: torch.Tensor = module(_rows(rank), uses[rank])
        return found

    expected = train_alone(Experts(), [[partial(loss, rank=rank) for rank in range(2)]] * 2)["norms"]
    for zero in (2, 3):
        for found in rank_pool.run(train_experts, 2, zero=zero, uses=uses):
            np.testing.assert_allclose(found, expected, rtol=1e-5)
