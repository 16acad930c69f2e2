"""The conjugate collectives of tensor parallelism and of sequence parallelism as autograd functions (Megatron-LM, arXiv
1909.08053, section 3, and 2205.05198, section 4.2.2).

Each says what it turns into what: *replicated* (same values on every rank), *partial* (the ranks' values sum to it),
*split* (each rank has its equal part of the sequence, dim -2).
"""

from typing import Any

import torch

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


def enter_block(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """What a tensor-parallel block does to its input.

    The first paper's f: replicated in, replicated out; backward sums partial gradients into a replicated one. Under
    sequence parallelism the second one's g: split in, replicated out (all-gather); backward turns partial gradients
    into the split one of their sum (reduce-scatter).
    """
    if group.size == 1:
        return x
    function = _GatherSequence if sequence_parallel else _CopyToGroup
    return function.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave_block(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """What a tensor-parallel block does to its output.

    The first paper's g: partial in, replicated out (their sum); backward hands the replicated gradient on. Under
    sequence parallelism the second one's g-bar: partial in, split out (reduce-scatter); backward turns the split
    gradient into a replicated one (all-gather).
    """
    if group.size == 1:
        return x
    function = _ScatterSequence if sequence_parallel else _ReduceFromGroup
    return function.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]
