"""Point-to-point messages between ranks of a group, without waiting; both ends know shape and dtype, so no pickle.

Messages between two ranks are matched by order, so both ranks must post theirs in the same order. Messages of one
`exchange` are posted as one batch: with NCCL a rank can then send to and receive from one peer without deadlock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from .collectives import Work, all_reduce, by_host, link_for
from .mesh import Group

# Bytes that a socket takes at once. The rest of a larger message would be sent only when the sender, which goes on
# computing, next waits for something; so larger messages go over gloo, which has a thread.
_MAX_LINK_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class Send:
    """A message to send: `tensor`, of any float dtype, to rank `destination` of the group."""

    tensor: torch.Tensor
    destination: int


@dataclass(frozen=True, slots=True)
class Receive:
    """A message to receive into the contiguous `tensor` from rank `source` of the group."""

    tensor: torch.Tensor
    source: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message under way. It holds its tensor, which must not be written before `wait` returns.

    Attributes:
        tensor: what is sent, or received.
        works: its operations.
        arrived: what is received on the host, for a tensor of a GPU; None for all others.
    """

    tensor: torch.Tensor
    works: tuple[Work, ...]
    arrived: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Waits until the tensor may be used (received) or written again (sent); on CUDA the current stream waits.

        Raises:
            RuntimeError: the peer has ended, or did not answer within the process group's timeout.
        """
        for work in self.works:
            work.wait()
        return self.tensor if self.arrived is None else self.tensor.copy_(self.arrived)


def connect(group: Group, device: torch.device) -> None:
    """Sets up a group; all ranks call it before the first `exchange`, since NCCL needs all of them for the set-up."""
    all_reduce(torch.zeros(1, device=device), group)


def exchange(messages: Sequence[Send | Receive], group: Group) -> list[PendingMessage]:
    """Posts messages as one batch and returns at once, with one `PendingMessage` per message, in order.

    Raises:
        RuntimeError: the connection to a peer is broken.
    """
    if any(by_host(message.tensor, group) for message in messages):
        return _exchange_by_host(messages, group)
    pending: dict[int, PendingMessage] = {}
    operations: dict[int, dist.P2POp] = {}
    for index, message in enumerate(messages):
        tensor = message.tensor.contiguous() if isinstance(message, Send) else message.tensor
        if link := link_for(tensor, group, _MAX_LINK_BYTES):
            sends = {message.destination: tensor} if isinstance(message, Send) else {}
            receives = {} if isinstance(message, Send) else {message.source: tensor}
            pending[index] = PendingMessage(tensor, (link.exchange(sends, receives),))
        elif isinstance(message, Send):
            operations[index] = dist.P2POp(
                dist.isend, tensor, group=group.process_group, group_peer=message.destination
            )
        else:
            operations[index] = dist.P2POp(dist.irecv, tensor, group=group.process_group, group_peer=message.source)
    return [each for _, each in sorted((pending | _post(operations)).items())]


def _exchange_by_host(messages: Sequence[Send | Receive], group: Group) -> list[PendingMessage]:
    """Posts messages of GPU tensors over gloo."""
    copies = [replace(each, tensor=each.tensor.cpu()) for each in messages]
    return [
        PendingMessage(message.tensor, under_way.works, under_way.tensor if isinstance(message, Receive) else None)
        for message, under_way in zip(messages, exchange(copies, group), strict=True)
    ]


def _post(operations: Mapping[int, dist.P2POp]) -> dict[int, PendingMessage]:
    """Posts messages that go over c10d as one batch."""
    if not operations:
        return {}
    works = tuple(dist.batch_isend_irecv(list(operations.values())))
    one_each = len(works) == len(operations)  # NCCL returns one work for the whole batch
    return {
        index: PendingMessage(operation.tensor, works[place : place + 1] if one_each else works)
        for place, (index, operation) in enumerate(operations.items())
    }
