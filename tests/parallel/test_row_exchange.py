"""Rows that move to other ranks and back: values, order and gradients, also without rows."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from tk.parallel.mesh import ALONE, Group, join_world
from tk.parallel.row_exchange import RowExchange, dispatch_rows, return_rows, start_dispatch
from tk.tests.rank_pool import RankPool

Dispatch: TypeAlias = Callable[[torch.Tensor, RowExchange], torch.Tensor]

COUNTS = [[2, 0, 5], [0, 0, 0], [1, 3, 0]]  # rows from each rank (a line) to each
WIDTH = 3


def rows_of(source: int, target: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows from one rank to another; each value is found once in the whole exchange."""
    first = 100 * source + 10 * target
    return torch.arange(first, first + COUNTS[source][target], dtype=dtype).unsqueeze(1).expand(-1, WIDTH)


def check_exchange() -> None:
    linked = join_world()
    for group in (linked, Group(linked.process_group, linked.rank, linked.size)):
        for dtype in (torch.float32, torch.bfloat16):
            for dispatch in (dispatch_rows, lambda rows, exchange: start_dispatch(rows, exchange)()):
                compare(group, dtype, dispatch)


def compare(group: Group, dtype: torch.dtype, dispatch: Dispatch) -> None:
    """Compares one exchange there and back with the rows of all ranks."""
    rank, ranks = group.rank, range(group.size)
    received = [COUNTS[source][rank] for source in ranks]
    order = torch.arange(sum(received)).flip(0)
    exchange = RowExchange(group, COUNTS[rank], received, order)
    sent = torch.cat([rows_of(rank, target, dtype) for target in ranks]).requires_grad_()
    arrived = dispatch(sent, exchange)
    assert arrived.equal(torch.cat([rows_of(source, rank, dtype) for source in ranks]).flip(0))
    returned = return_rows(arrived * (rank + 1), exchange)
    factors = torch.tensor([target + 1 for target in ranks for _ in range(COUNTS[rank][target])]).unsqueeze(1)
    assert returned.equal(sent * factors)
    (returned * sent.detach()).sum().backward()
    assert sent.grad is not None
    assert sent.grad.equal(sent.detach() * factors), "gradients go the same way back, and no rank scales them"


def test_rows_and_gradients_reach_their_ranks_and_come_back(rank_pool: RankPool) -> None:
    rank_pool.run(check_exchange, 3)


@pytest.mark.parametrize("order", [None, torch.tensor([2, 0, 1])])
def test_a_rank_alone_only_arranges(order: torch.Tensor | None) -> None:
    rows = torch.randn(3, WIDTH)
    exchange = RowExchange(ALONE, [3], [3], order)
    arrived = dispatch_rows(rows, exchange)
    assert arrived.equal(rows if order is None else rows[order])
    assert return_rows(arrived, exchange).equal(rows)
