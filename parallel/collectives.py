"""The collectives that tk uses, in one place: plain functions on local tensors, no-ops for a group of one.

Sums only, divided by the caller: averaging was silently wrong on older gloo. Names follow torch's newer spelling, and
fall back where torch is older.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .mesh import Group

Finish = Callable[[], None]  # waits for a collective that was started; its tensors belong to it until then


def _nothing() -> None:
    """The end of what a group of one does not do."""


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Sums (or `op`) `tensor` over the group in place; every rank ends with the same bits. Returns it."""
    if group.size > 1:
        dist.all_reduce(tensor, op=op, group=group.process_group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Elementwise maximum over the group, in place. Returns it."""
    return all_reduce(tensor, group, dist.ReduceOp.MAX)


def all_gather(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Every rank's tensor of the same shape, in rank order."""
    if group.size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return parts


def start_all_reduce(tensor: torch.Tensor, group: Group) -> Finish:
    """Begins to sum `tensor` over the group in place."""
    if group.size == 1:
        return _nothing
    work = dist.all_reduce(tensor, group=group.process_group, async_op=True)
    return lambda: _wait(work)


def start_all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> Finish:
    """Begins to fill 1-D `output` [size * n] with every rank's `part` [n], which may be this rank's own range of it."""
    if group.size > 1:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(output, part, group=group.process_group, async_op=True)
        return lambda: _wait(work)
    if output.data_ptr() != part.data_ptr():
        output.copy_(part)
    return _nothing


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    """`start_all_gather_flat` and its end."""
    start_all_gather_flat(output, part, group)()


def start_reduce_scatter_flat(output: torch.Tensor, values: torch.Tensor, group: Group) -> Finish:
    """Begins to sum 1-D `values` [size * n] over the group and to leave this rank's range [n] in `output`."""
    if group.size == 1:
        if output.data_ptr() != values.data_ptr():
            output.copy_(values)
        return _nothing
    if values.is_cuda:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = scatter(output, values, group=group.process_group, async_op=True)
        return lambda: _wait(work)
    # On gloo an all-to-all and a sum of our own take a third of the time of its reduce-scatter (measured).
    parts = torch.empty_like(values)
    work = dist.all_to_all_single(parts, values, group=group.process_group, async_op=True)

    def finish() -> None:
        _wait(work)
        torch.sum(parts.view(group.size, -1), dim=0, out=output)

    return finish


def reduce_scatter_flat(output: torch.Tensor, values: torch.Tensor, group: Group) -> None:
    """`start_reduce_scatter_flat` and its end."""
    start_reduce_scatter_flat(output, values, group)()


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def all_gather_dim(part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Every rank's part, of one shape, one after another along `dim` (negative)."""
    if group.size == 1:
        return part
    parts = part.new_empty(group.size, *part.shape)
    all_gather_flat(parts.view(-1), part.reshape(-1), group)
    return parts.movedim(0, dim - 1).flatten(dim - 1, dim)


def reduce_scatter_dim(values: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sums `values` over the group and returns this rank's equal part of the sum along `dim` (negative)."""
    if group.size == 1:
        return values
    parts = values.unflatten(dim, (group.size, -1)).movedim(dim - 1, 0)
    output = values.new_empty(parts.shape[1:])
    reduce_scatter_flat(output.view(-1), parts.reshape(-1), group)
    return output


def broadcast(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gives every rank the values of the group's rank 0, in place. Returns it."""
    if group.size > 1:
        dist.broadcast(tensor, group=group.process_group, group_src=0)
    return tensor


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds a power-of-two number of tensors as one fixed binary tree: its bits do not depend on who held what."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
