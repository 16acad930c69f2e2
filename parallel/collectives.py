"""The collectives that tk uses, in one place: plain functions on local tensors, no-ops for a group of one.

Sums only, divided by the caller: averaging was silently wrong on older gloo. Names follow torch's newer spelling, and
fall back where torch is older.
"""

import torch
import torch.distributed as dist

from .mesh import Group


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


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    """Fills 1-D `output` [size * n] with every rank's `part` [n]. `part` may be this rank's own range of `output`."""
    if group.size > 1:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(output, part, group=group.process_group)
    elif output.data_ptr() != part.data_ptr():
        output.copy_(part)


def reduce_scatter_flat(output: torch.Tensor, values: torch.Tensor, group: Group) -> None:
    """Sums 1-D `values` [size * n] over the group and leaves this rank's range [n] in `output`."""
    if group.size > 1:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(output, values, group=group.process_group)
    elif output.data_ptr() != values.data_ptr():
        output.copy_(values)


def broadcast(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gives every rank the values of the group's rank 0, in place. Returns it."""
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
