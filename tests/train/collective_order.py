"""The collectives and messages of a rank in their order, and whether ranks with such orders could wait for ever.

gloo runs operations of different groups side by side. NCCL runs them in the order in which a stream has them, so ranks
that order two groups differently work on a CPU and hang on GPUs: the order is therefore checked, not the run.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tk.parallel.link_factory import LinkFactory

_SIZED = ("all_reduce", "broadcast", "all_gather", "all_gather_single", "all_gather_into_tensor")
_UNSIZED = ("all_to_all_single",)  # ranks may send each other different numbers of rows


class Event(NamedTuple):
    """An operation that a rank starts, or, of a message that it receives, waits for.

    Attributes:
        kind: the function of torch.distributed for a collective; "send" or "receive" for a message.
        ranks: the members of the group, by their numbers in the world; of a message, the sender and the receiver.
        size: the number of elements; -1 where ranks may differ.
    """

    kind: str
    ranks: tuple[int, ...]
    size: int


class _Noted:
    """A receive under way; its wait is an event, once."""

    def __init__(self, work: Any, events: list[Event], event: Event) -> None:
        self._work, self._events, self._event = work, events, [event]

    def wait(self) -> object:
        self._events += self._event
        self._event = []
        return self._work.wait()


def record(patch: pytest.MonkeyPatch) -> list[Event]:
    """Makes everything go over torch.distributed; the returned list grows by each operation of this rank."""
    events: list[Event] = []
    patch.setattr(LinkFactory, "link", lambda self, ranks: None)

    def noted(name: str, sized: bool) -> Any:
        operation = getattr(dist, name)

        def run(*arguments: Any, **keywords: Any) -> Any:
            size = next(each.numel() for each in reversed(arguments) if hasattr(each, "numel")) if sized else -1
            events.append(Event(name, tuple(dist.get_process_group_ranks(keywords.get("group"))), size))
            return operation(*arguments, **keywords)

        return run

    for name in (*_SIZED, *_UNSIZED):
        if hasattr(dist, name):
            patch.setattr(dist, name, noted(name, name in _SIZED))
    post, send = dist.batch_isend_irecv, dist.isend

    def post_noted(operations: list[Any]) -> list[Any]:
        works: list[Any] = []
        for operation, work in zip(operations, post(operations), strict=True):
            ranks = dist.get_process_group_ranks(operation.group)
            me, peer, size = dist.get_rank(), ranks[operation.group_peer], operation.tensor.numel()
            if operation.op is send:
                events.append(Event("send", (me, peer), size))
                works.append(work)
            else:
                works.append(_Noted(work, events, Event("receive", (peer, me), size)))
        return works

    patch.setattr(dist, "batch_isend_irecv", post_noted)
    return events


def find_deadlock(orders: Sequence[Sequence[Event]]) -> str:
    """Runs the orders of all ranks, each rank strictly one event after another; returns where they stop, or "".

    A collective ends when each member of its group is at it, with the same kind and size. A send ends at once, and a
    receive when its message was sent.
    """
    waiting = [deque(order) for order in orders]
    sent: Counter[Event] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(waiting):
            while order and _ends(rank, waiting, sent):
                moved = True
    left = [f"rank {rank} waits in {order[0]}" for rank, order in enumerate(waiting) if order]
    return "; ".join([*left, *(f"{each} is never received" for each in sent.elements())])


def _ends(rank: int, waiting: Sequence[deque[Event]], sent: Counter[Event]) -> bool:
    """Ends the first event of a rank for all that take part in it, if it can end now."""
    event = waiting[rank][0]
    if event.kind == "send":
        sent[event._replace(kind="receive")] += 1
        members: tuple[int, ...] = (rank,)
    elif event.kind == "receive":
        if not sent[event]:
            return False
        sent[event] -= 1
        members = (rank,)
    else:
        members = event.ranks
        if not all(waiting[member] and waiting[member][0] == event for member in members):
            return False
    for member in members:
        waiting[member].popleft()
    return True
