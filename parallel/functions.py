"""The conjugate collectives of tensor parallelism and of sequence parallelism as autograd functions (Megatron-LM, arXiv
1909.08053, section 3, and 2205.05198, section 4.2.2).

A tensor is *replicated* (every rank holds the same values), *partial* (the ranks' values sum to the whole one) or
*split* (each rank holds an equal part of the sequence, dim -2).
"""

from typing import Any

import torch
import torch.nn.functional as F

from ..core.integers import ceil_div
from .collectives import all_gather_dim, all_reduce, reduce_scatter_dim
from .mesh import Group

SEQUENCE = -2  # the dim of hidden states [..., L, D] that sequence parallelism splits


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_dim(x, SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_dim(grads[0], SEQUENCE, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_dim(x, SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_dim(grads[0], SEQUENCE, ctx.group), None


class _DealSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.length = group, x.shape[SEQUENCE]
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_parts(grads[0], ctx.length, ctx.group), None


class _CollectSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length: int, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_parts(x, length, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_part(grads[0], ctx.group), None, None


def _own_part(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns this rank's part of the sequence; parts are equally long, so the last ones may end with zeros."""
    length = x.shape[SEQUENCE]
    size = ceil_div(length, group.size)
    own = x.narrow(SEQUENCE, min(group.rank * size, length), min(size, max(0, length - group.rank * size)))
    return F.pad(own, (0, 0, 0, size - own.shape[SEQUENCE]))


def _all_parts(x: torch.Tensor, length: int, group: Group) -> torch.Tensor:
    return all_gather_dim(x, SEQUENCE, group).narrow(SEQUENCE, 0, length)


def deal_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns this rank's part of a replicated tensor, split, with zeros where the sequence has too few tokens.

    Backward all-gathers the parts' gradients.
    """
    if group.size == 1:
        return x
    return _DealSequence.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def collect_sequence(x: torch.Tensor, length: int, group: Group) -> torch.Tensor:
    """All-gathers a tensor that is split as by `deal_sequence`; backward takes this rank's part of the gradient.

    The gradient is replicated: every rank must compute the same from the result.
    """
    if group.size == 1:
        return x
    return _CollectSequence.apply(x, length, group)  # type: ignore[no-any-return, no-untyped-call]


def enter_block(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """Makes the input of a tensor-parallel block replicated.

    Without sequence parallelism it is replicated already, and backward sums the partial gradients (all-reduce; f in
    the first paper). With it, a split input is all-gathered, and backward reduce-scatters the partial gradients (g in
    the second paper).
    """
    if group.size == 1:
        return x
    function = _GatherSequence if sequence_parallel else _CopyToGroup
    return function.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave_block(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """Sums the partial outputs of a tensor-parallel block.

    Without sequence parallelism the sum is replicated (all-reduce), and backward passes the replicated gradient on
    (g in the first paper). With it, the sum is split (reduce-scatter), and backward all-gathers the split gradient
    (g-bar in the second paper).
    """
    if group.size == 1:
        return x
    function = _ScatterSequence if sequence_parallel else _ReduceFromGroup
    return function.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]
