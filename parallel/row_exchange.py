"""Rows that move to other ranks and come back, as conjugate functions: an all-to-all each way.

Letters: S rows that this rank sends, R rows that it receives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .collectives import PendingResult, start_all_to_all
from .functions import conjugate
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

    def start_send(self, rows: torch.Tensor) -> PendingResult:
        """Starts to send rows [S, ...]; the result are those that arrive, arranged, [R, ...]."""
        pending = start_all_to_all(rows.contiguous(), self.sent, self.received, self.group)
        return pending if self.order_R is None else pending.then(lambda arrived: arrived[self.order_R])

    def start_send_back(self, rows: torch.Tensor) -> PendingResult:
        """Starts to send arranged rows [R, ...] to where they came from; the result has one for each sent, [S, ...]."""
        if self.order_R is not None:
            rows = torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, self.order_R, rows)
        return start_all_to_all(rows.contiguous(), self.received, self.sent, self.group)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows as `start_send`, and waits."""
        return self.start_send(rows).wait()

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows as `start_send_back`, and waits."""
        return self.start_send_back(rows).wait()


class _Flight:
    """Rows on their way, and later their gradients on the way back. Autograd sees an empty tensor in their place."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._pending: PendingResult | None = None

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        self._pending = self._exchange.start_send(rows)
        return rows.new_empty(0)

    def leave_back(self, grads: torch.Tensor) -> torch.Tensor:
        self._pending = self._exchange.start_send_back(grads)
        return grads.new_empty(0)

    def arrive(self, _in_place: torch.Tensor) -> torch.Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None, "rows arrive once for each time that they leave"
        return pending.wait()


def start_dispatch(rows_SD: torch.Tensor, exchange: RowExchange) -> Callable[[], torch.Tensor]:
    """Does what `dispatch_rows` does, but returns at once; the result, called once, waits for the rows [R, D].

    Backward starts to send gradients back where forward waited, and waits for them where forward started: autograd
    takes the newest operations first, so that those between the two are computed in between there, too.
    """
    flight = _Flight(exchange)
    in_place = conjugate(rows_SD, flight.leave, flight.arrive)
    return lambda: conjugate(in_place, flight.arrive, flight.leave_back)


def dispatch_rows(rows_SD: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Sends rows [S, D] to their ranks; returns the rows that arrive, [R, D]. Backward sends gradients back.

    Every rank of the group calls it, and runs its backward, also without any rows.
    """
    return conjugate(rows_SD, exchange.send, exchange.send_back)


def return_rows(rows_RD: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Sends rows [R, D], one for each that `dispatch_rows` returned, back; returns [S, D], in the order of its rows."""
    return conjugate(rows_RD, exchange.send_back, exchange.send)
