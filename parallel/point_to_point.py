"""Tensors from one rank of a group to another, without waiting: both know shape and dtype, so nothing is pickled.

Every message between two ranks is matched by order, not by name, so both must post in the same order. What is posted
together goes out together: with NCCL a rank may send to and receive from the same peer in one call without deadlock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from .collectives import Work, all_reduce, link_for
from .mesh import Group

# Bytes that a socket takes at once: what it does not would wait until the sender, who computes on, waits for something.
_LINKED: Final = 2**16


@dataclass(frozen=True, slots=True)
class Send:
    """`tensor`, of any float dtype, to a rank of the group."""

    tensor: torch.Tensor
    destination: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Fills the contiguous `tensor` with what a rank of the group sends."""

    tensor: torch.Tensor
    source: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message on its way. Its tensor is kept until it is waited for and must not be written meanwhile."""

    tensor: torch.Tensor
    works: tuple[Work, ...]

    def wait(self) -> torch.Tensor:
        """The tensor, once it may be used (received) or written again (sent). On CUDA the current stream waits.

        Raises:
            RuntimeError: the peer is gone, or did not answer within the process group's timeout.
        """
        for work in self.works:
            work.wait()
        return self.tensor


def connect(group: Group, device: torch.device) -> None:
    """Called by all ranks of a group before the first `exchange`: NCCL sets up a group with all its ranks at once."""
    all_reduce(torch.zeros(1, device=device), group)


def exchange(messages: Sequence[Send | Receive], group: Group) -> list[PendingMessage]:
    """Posts messages as one batch and returns at once; one `PendingMessage` for each, in order.

    Raises:
        RuntimeError: the connection to a peer is broken.
    """
    pending: dict[int, PendingMessage] = {}
    operations: dict[int, dist.P2POp] = {}
    for index, message in enumerate(messages):
        tensor = message.tensor.contiguous() if isinstance(message, Send) else message.tensor
        if link := link_for(tensor, group, _LINKED):
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


def _post(operations: Mapping[int, dist.P2POp]) -> dict[int, PendingMessage]:
    """Posts c10d's messages as one batch."""
    if not operations:
        return {}
    works = tuple(dist.batch_isend_irecv(list(operations.values())))
    one_each = len(works) == len(operations)  # NCCL has one work for the whole batch
    return {
        index: PendingMessage(operation.tensor, works[place : place + 1] if one_each else works)
        for place, (index, operation) in enumerate(operations.items())
    }
