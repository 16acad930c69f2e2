"""The collectives that tk uses, in one place: plain functions on local tensors, no-ops for a group of one.

Sums only, divided by the caller: averaging was silently wrong on older gloo. Names follow torch's newer spelling, and
fall back where torch is older.
"""

from collections.abc import Callable
from typing import Final, Protocol

import torch
import torch.distributed as dist

from .local_link import Link
from .mesh import Group

# Elements of a tensor on the CPU that is summed over more than 2 ranks by sending it whole: 3 to 5 times as fast there
# (measured, 4 and 8 ranks); smaller ones gloo sends so itself, larger ones are better cut.
_SENT_WHOLE: Final = range(64, 2**14)
_LINKED_SUM: Final = 2**20  # bytes that a rank sends to sum over a link of its host; beyond, gloo is as fast


class Work(Protocol):
    """What is under way."""

    def wait(self) -> object:
        """Returns once it has ended."""


class PendingResult:
    """A collective's result that may still be under way; until then the tensors involved belong to it."""

    def __init__(
        self,
        tensor: torch.Tensor,
        work: Work | None = None,
        arrange: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._tensor, self._work, self._arrange = tensor, work, arrange

    def wait(self) -> torch.Tensor:
        """The result, once it is there."""
        if self._work is not None:
            self._work.wait()
        return self._arrange(self._tensor)

    def then(self, arrange: Callable[[torch.Tensor], torch.Tensor]) -> "PendingResult":
        """The same with its result looked at in another way."""
        before = self._arrange
        return PendingResult(self._tensor, self._work, lambda tensor: arrange(before(tensor)))


def all_reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sums `tensor` over the group in place; every rank ends with the same bits. Returns it."""
    return start_all_reduce(tensor, group).wait()


def all_reduce_max(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Elementwise maximum over the group, in place. Returns it."""
    if link := link_for(tensor, group, _LINKED_SUM // max(1, group.size - 1)):
        parts, work = _start_sending_whole(tensor, group, link)
        work.wait()
        return tensor.copy_(parts.amax(dim=0))
    if group.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.process_group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Every rank's tensor of the same shape, in rank order."""
    if group.size == 1:
        return [tensor]
    if link := link_for(tensor, group):
        whole, work = _start_sending_whole(tensor, group, link)
        work.wait()
        return list(whole.unbind())
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return parts


def link_for(tensor: torch.Tensor, group: Group, limit: int | None = None) -> Link | None:
    """The group's link, if it is the way for such tensors: on the CPU, of `limit` bytes at most."""
    return group.link if tensor.device.type == "cpu" and (limit is None or tensor.nbytes <= limit) else None


def _start_sending_whole(tensor: torch.Tensor, group: Group, link: Link) -> tuple[torch.Tensor, Work]:
    """Begins to send a tensor to every peer and to fill [size, ...] with everybody's."""
    parts = tensor.new_empty(group.size, *tensor.shape)
    own = parts[group.rank].copy_(tensor)
    return parts, _start_filling(parts, own, group, link)


def _start_filling(parts: torch.Tensor, own: torch.Tensor, group: Group, link: Link) -> Work:
    """Begins to fill the rows of `parts` but this rank's with their ranks' `own`."""
    return link.exchange(dict.fromkeys(link.connections, own), {rank: parts[rank] for rank in link.connections})


def start_all_reduce(tensor: torch.Tensor, group: Group) -> PendingResult:
    """Begins to sum `tensor` over the group, in place."""
    if group.size == 1:
        return PendingResult(tensor)
    if link := link_for(tensor, group, _LINKED_SUM // (group.size - 1)):
        parts, work = _start_sending_whole(tensor, group, link)
        return PendingResult(parts, work, lambda parts: _sum_in_order(parts, tensor))
    if not tensor.is_cuda and group.size > 2 and tensor.numel() in _SENT_WHOLE:
        # gloo's ring takes 2 (size - 1) messages one after another; everybody's tensor to everybody else is one.
        parts = tensor.new_empty(group.size, *tensor.shape)
        sent = tensor.reshape(-1).repeat(group.size)
        work = dist.all_to_all_single(parts.view(-1), sent, group=group.process_group, async_op=True)
        return PendingResult(parts, work, lambda parts: _sum_in_order(parts, tensor))
    return PendingResult(tensor, dist.all_reduce(tensor, group=group.process_group, async_op=True))


def _sum_in_order(parts: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Adds up parts [size, ...] one by one, elementwise: the same bits on every rank."""
    output.copy_(parts[0])
    for part in parts[1:]:
        output.add_(part)
    return output


def start_all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> PendingResult:
    """Begins to fill 1-D `output` [size * n] with every rank's `part` [n], which may be this rank's own range of it."""
    if link := link_for(part, group):
        own = output.view(group.size, -1)[group.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return PendingResult(output, _start_filling(output.view(group.size, -1), own, group, link))
    if group.size > 1:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return PendingResult(output, gather(output, part, group=group.process_group, async_op=True))
    return PendingResult(output if output.data_ptr() == part.data_ptr() else output.copy_(part))


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    """`start_all_gather_flat` and its end."""
    start_all_gather_flat(output, part, group).wait()


def start_reduce_scatter_flat(output: torch.Tensor, values: torch.Tensor, group: Group) -> PendingResult:
    """Begins to sum 1-D `values` [size * n] over the group and to leave this rank's range [n] in `output`."""
    if group.size == 1:
        return PendingResult(output if output.data_ptr() == values.data_ptr() else output.copy_(values))
    if values.is_cuda:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return PendingResult(output, scatter(output, values, group=group.process_group, async_op=True))
    values = values.contiguous()
    parts = torch.empty_like(values)
    work: Work
    if link := link_for(output, group):
        ours, theirs = parts.view(group.size, -1), values.view(group.size, -1)
        ours[group.rank] = theirs[group.rank]
        peers = link.connections
        work = link.exchange({rank: theirs[rank] for rank in peers}, {rank: ours[rank] for rank in peers})
    else:  # on gloo this and a sum of our own take a third of the time of its reduce-scatter (measured)
        work = dist.all_to_all_single(parts, values, group=group.process_group, async_op=True)
    return PendingResult(parts, work, lambda parts: torch.sum(parts.view(group.size, -1), dim=0, out=output))


def start_all_gather_dim(part: torch.Tensor, dim: int, group: Group) -> PendingResult:
    """Begins to lay every rank's part, of one shape, one after another along `dim` (negative)."""
    if group.size == 1:
        return PendingResult(part)
    parts = part.new_empty(group.size, *part.shape)
    pending = start_all_gather_flat(parts.view(-1), part.reshape(-1), group)
    return pending.then(lambda _: parts.movedim(0, dim - 1).flatten(dim - 1, dim))


def start_reduce_scatter_dim(values: torch.Tensor, dim: int, group: Group) -> PendingResult:
    """Begins to sum `values` over the group; the result is this rank's equal part of the sum along `dim` (negative)."""
    if group.size == 1:
        return PendingResult(values)
    parts = values.unflatten(dim, (group.size, -1)).movedim(dim - 1, 0)
    output = values.new_empty(parts.shape[1:])
    pending = start_reduce_scatter_flat(output.view(-1), parts.reshape(-1), group)
    return pending.then(lambda _: output)


def all_gather_dim(part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Every rank's part, of one shape, one after another along `dim` (negative)."""
    return start_all_gather_dim(part, dim, group).wait()


def reduce_scatter_dim(values: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sums `values` over the group and returns this rank's equal part of the sum along `dim` (negative)."""
    return start_reduce_scatter_dim(values, dim, group).wait()


def broadcast(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gives every rank the values of the group's rank 0, in place. Returns it."""
    if link := link_for(tensor, group):
        whole = tensor.contiguous()
        sends = dict.fromkeys(link.connections, whole) if group.rank == 0 else {}
        link.exchange(sends, {} if group.rank == 0 else {0: whole}).wait()
        return tensor if whole is tensor else tensor.copy_(whole)
    if group.size > 1:
        dist.broadcast(tensor, group=group.process_group, group_src=0)
    return tensor


def gather_bytes(data: bytes, group: Group) -> list[bytes]:
    """Every rank's bytes, of any length each, in rank order. One small collective if all are empty, else two."""
    if group.size == 1:
        return [data]
    device = torch.device("cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu")
    sizes = [int(size) for size in all_gather(torch.tensor(len(data), device=device), group)]
    if not any(sizes):
        return [b""] * group.size
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
    parts = all_gather(padded, group)
    return [bytes(part[:size].cpu().numpy()) for part, size in zip(parts, sizes, strict=True)]


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds a power-of-two number of tensors as one fixed binary tree: its bits do not depend on who held what."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
