"""All collectives of the toolkit: plain functions on local tensors, which do nothing in a group of one rank.

Tensors of a GPU go over NCCL. In a group of gloo, whose ranks may share one GPU, they go through copies on the host.

Reductions are sums, and the caller divides: gloo's averaging was silently wrong in older versions. The functions of
torch go by their newer names, and by their older ones where torch is older.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist

from .local_link import Link
from .mesh import Group

# Numbers of elements at which a CPU tensor is summed over more than 2 ranks by an all-to-all of whole tensors: 3 to 5
# times as fast as gloo's ring (measured, 4 and 8 ranks). gloo does the same for smaller ones; larger ones it cuts.
_ALL_TO_ALL_SIZES: Final = range(64, 2**14)
_MAX_LINK_BYTES: Final = 2**20  # bytes that a rank sends over its links for one sum; beyond that, gloo is as fast


class Work(Protocol):
    """An operation under way: torch's work objects, or an exchange over a link."""

    def wait(self) -> object:
        """Returns once the operation has ended."""


class PendingResult:
    """The result of a collective that may still be under way.

    Until `wait` returns, the tensors passed to the collective must be neither read nor written.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        work: Work | None = None,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._tensor, self._work, self._finish = tensor, work, finish

    def wait(self) -> torch.Tensor:
        """Waits for the collective and returns its result."""
        if self._work is not None:
            self._work.wait()
        return self._finish(self._tensor)

    def then(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> "PendingResult":
        """Returns a result to which `finish` is applied after the wait."""
        before = self._finish
        return PendingResult(self._tensor, self._work, lambda tensor: finish(before(tensor)))


def all_reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sums `tensor` over the group in place; every rank ends with the same bits. Returns it."""
    return start_all_reduce(tensor, group).wait()


def all_reduce_max(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Takes the elementwise maximum of `tensor` over the group, in place. Returns it."""
    if by_host(tensor, group):
        return tensor.copy_(all_reduce_max(tensor.cpu(), group))
    if link := link_for(tensor, group, _MAX_LINK_BYTES // max(1, group.size - 1)):
        parts, work = _start_link_gather(tensor, group, link)
        work.wait()
        return tensor.copy_(parts.amax(dim=0))
    if group.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.process_group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Returns every rank's tensor, in rank order; all have the same shape."""
    if group.size == 1:
        return [tensor]
    if by_host(tensor, group):
        return [part.to(tensor.device) for part in all_gather(tensor.cpu(), group)]
    if link := link_for(tensor, group):
        whole, work = _start_link_gather(tensor, group, link)
        work.wait()
        return list(whole.unbind())
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return parts


def by_host(tensor: torch.Tensor, group: Group) -> bool:
    """Returns whether a message goes through a copy on the host."""
    return tensor.is_cuda and group.over_gloo


def link_for(tensor: torch.Tensor, group: Group, limit: int | None = None) -> Link | None:
    """Returns the group's link if `tensor` should go over it: one on the CPU, of `limit` bytes at most."""
    return group.link if tensor.device.type == "cpu" and (limit is None or tensor.nbytes <= limit) else None


def _start_link_gather(tensor: torch.Tensor, group: Group, link: Link) -> tuple[torch.Tensor, Work]:
    """Starts an all-gather of whole tensors over a link; returns the result [size, ...] and the work to wait for."""
    parts = tensor.new_empty(group.size, *tensor.shape)
    own = parts[group.rank].copy_(tensor)
    return parts, _start_row_exchange(parts, own, link)


def _start_row_exchange(parts: torch.Tensor, own: torch.Tensor, link: Link) -> Work:
    """Starts to send `own` to every peer and to receive each peer's tensor into its row of `parts`."""
    return link.exchange(dict.fromkeys(link.connections, own), {rank: parts[rank] for rank in link.connections})


def start_all_reduce(tensor: torch.Tensor, group: Group) -> PendingResult:
    """Starts to sum `tensor` over the group, in place."""
    if group.size == 1:
        return PendingResult(tensor)
    if by_host(tensor, group):
        return start_all_reduce(tensor.cpu(), group).then(tensor.copy_)
    if link := link_for(tensor, group, _MAX_LINK_BYTES // (group.size - 1)):
        parts, work = _start_link_gather(tensor, group, link)
        return PendingResult(parts, work, lambda parts: _sum_in_order(parts, tensor))
    if not tensor.is_cuda and group.size > 2 and tensor.numel() in _ALL_TO_ALL_SIZES:
        # gloo's ring sends 2 (size - 1) messages one after another; an all-to-all of whole tensors has one round.
        parts = tensor.new_empty(group.size, *tensor.shape)
        sent = tensor.reshape(-1).repeat(group.size)
        work = dist.all_to_all_single(parts.view(-1), sent, group=group.process_group, async_op=True)
        return PendingResult(parts, work, lambda parts: _sum_in_order(parts, tensor))
    return PendingResult(tensor, dist.all_reduce(tensor, group=group.process_group, async_op=True))


def _on_host(output: torch.Tensor) -> torch.Tensor:
    """Returns memory of the host for a result."""
    return torch.empty(output.shape, dtype=output.dtype)


def _sum_in_order(parts: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Sums parts [size, ...] over dim 0 in rank order, so that every rank gets the same bits."""
    output.copy_(parts[0])
    for part in parts[1:]:
        output.add_(part)
    return output


def start_all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> PendingResult:
    """Starts to gather every rank's `part` [n] into 1-D `output` [size * n]; `part` may be this rank's range of it."""
    if by_host(part, group):
        return start_all_gather_flat(_on_host(output), part.cpu(), group).then(output.copy_)
    if link := link_for(part, group):
        own = output.view(group.size, -1)[group.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return PendingResult(output, _start_row_exchange(output.view(group.size, -1), own, link))
    if group.size > 1:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return PendingResult(output, gather(output, part, group=group.process_group, async_op=True))
    return PendingResult(output if output.data_ptr() == part.data_ptr() else output.copy_(part))


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    """Gathers every rank's `part` [n] into 1-D `output` [size * n]."""
    start_all_gather_flat(output, part, group).wait()


def start_reduce_scatter_flat(output: torch.Tensor, values: torch.Tensor, group: Group) -> PendingResult:
    """Starts to sum 1-D `values` [size * n] over the group; `output` [n] receives this rank's range of the sum."""
    if group.size == 1:
        return PendingResult(output if output.data_ptr() == values.data_ptr() else output.copy_(values))
    if by_host(values, group):
        return start_reduce_scatter_flat(_on_host(output), values.cpu(), group).then(output.copy_)
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
    else:  # an all-to-all and a local sum take a third of the time of gloo's reduce-scatter (measured)
        work = dist.all_to_all_single(parts, values, group=group.process_group, async_op=True)
    return PendingResult(parts, work, lambda parts: torch.sum(parts.view(group.size, -1), dim=0, out=output))


def start_all_gather_dim(part: torch.Tensor, dim: int, group: Group) -> PendingResult:
    """Starts to concatenate every rank's part, all of one shape, along `dim` (negative)."""
    if group.size == 1:
        return PendingResult(part)
    parts = part.new_empty(group.size, *part.shape)
    pending = start_all_gather_flat(parts.view(-1), part.reshape(-1), group)
    return pending.then(lambda _: parts.movedim(0, dim - 1).flatten(dim - 1, dim))


def start_reduce_scatter_dim(values: torch.Tensor, dim: int, group: Group) -> PendingResult:
    """Starts to sum `values` over the group; the result is this rank's equal part of the sum along `dim` (negative)."""
    if group.size == 1:
        return PendingResult(values)
    parts = values.unflatten(dim, (group.size, -1)).movedim(dim - 1, 0)
    output = values.new_empty(parts.shape[1:])
    pending = start_reduce_scatter_flat(output.view(-1), parts.reshape(-1), group)
    return pending.then(lambda _: output)


def all_gather_dim(part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Concatenates every rank's part, all of one shape, along `dim` (negative)."""
    return start_all_gather_dim(part, dim, group).wait()


def reduce_scatter_dim(values: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sums `values` over the group and returns this rank's equal part of the sum along `dim` (negative)."""
    return start_reduce_scatter_dim(values, dim, group).wait()


def start_all_to_all(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> PendingResult:
    """Starts to send rows [sum(sent), ...] to all ranks; the result [sum(received), ...] has theirs in rank order.

    Args:
        rows: contiguous; those for rank 0 come first, then those for rank 1, and so on.
        sent: the number of rows for each rank.
        received: the number of rows from each rank.
        group: the ranks; each passes as many rows to another as the other expects.
    """
    if group.size == 1:
        return PendingResult(rows)
    if by_host(rows, group):
        return start_all_to_all(rows.cpu(), sent, received, group).then(lambda arrived: arrived.to(rows.device))
    output = rows.new_empty(sum(received), *rows.shape[1:])
    if link := link_for(rows, group):
        theirs, ours = rows.split(list(sent)), output.split(list(received))
        ours[group.rank].copy_(theirs[group.rank])
        peers = link.connections
        return PendingResult(output, link.exchange({r: theirs[r] for r in peers}, {r: ours[r] for r in peers}))
    splits = (list(received), list(sent))
    return PendingResult(
        output, dist.all_to_all_single(output, rows, *splits, group=group.process_group, async_op=True)
    )


def broadcast(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Copies the values of the group's rank 0 into every rank's `tensor`. Returns it."""
    if by_host(tensor, group):
        return tensor.copy_(broadcast(tensor.cpu(), group))
    if link := link_for(tensor, group):
        whole = tensor.contiguous()
        sends = dict.fromkeys(link.connections, whole) if group.rank == 0 else {}
        link.exchange(sends, {} if group.rank == 0 else {0: whole}).wait()
        return tensor if whole is tensor else tensor.copy_(whole)
    if group.size > 1:
        dist.broadcast(tensor, group=group.process_group, group_src=0)
    return tensor


def gather_bytes(data: bytes, group: Group) -> list[bytes]:
    """Returns every rank's bytes, of any lengths, in rank order: one small collective if all are empty, else two."""
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
    """Adds tensors in a fixed binary tree; of an odd number, the last one moves up a level as it is.

    The bits of a sum of 2^n terms do not depend on how many ranks the terms were spread over.
    """
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]
