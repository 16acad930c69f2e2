"""Rows that move to other ranks and come back, as conjugate autograd functions: an all-to-all each way.

Letters: S rows that this rank sends, R rows that it receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .collectives import start_all_to_all
from .mesh import Group


@dataclass(frozen=True, slots=True)
class RowExchange:
    """The rows that move between the ranks of a group, from the side of one of them.

    Attributes:
        group: the ranks.
        sent: the number of rows for each rank; those for rank 0 come first.
        received: the number of rows from each rank.
        order_R: int64, the arranged rows as places among those that arrive, which are ordered by the rank they are
            from; None leaves them so.
    """

    group: Group
    sent: Sequence[int]
    received: Sequence[int]
    order_R: torch.Tensor | None = None

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows [S, ...] and returns those that arrive, arranged, [R, ...]."""
        arrived = start_all_to_all(rows.contiguous(), self.sent, self.received, self.group).wait()
        return arrived if self.order_R is None else arrived[self.order_R]

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends arranged rows [R, ...] to where they came from; returns a row for each that was sent, [S, ...]."""
        if self.order_R is not None:
            rows = torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, self.order_R, rows)
        return start_all_to_all(rows.contiguous(), self.received, self.sent, self.group).wait()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.send_back(grads[0]), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send_back(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.send(grads[0]), None


def dispatch_rows(rows_SD: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Sends rows [S, D] to their ranks; returns the rows that arrive, [R, D]. Backward sends gradients back.

    Every rank of the group calls it, and runs its backward, also without any rows.
    """
    return _Dispatch.apply(rows_SD, exchange)  # type: ignore[no-any-return, no-untyped-call]


def return_rows(rows_RD: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Sends rows [R, D], one for each that `dispatch_rows` returned, back; returns [S, D], in the order of its rows."""
    return _Return.apply(rows_RD, exchange)  # type: ignore[no-any-return, no-untyped-call]
