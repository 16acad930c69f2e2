"""The conjugate collectives of tensor parallelism as autograd functions (Megatron-LM, arXiv 1909.08053, section 3).

Each says what it turns into what: *replicated* (same values on every rank), *partial* (the ranks' values sum to it).
"""

from typing import Any

import torch

from .collectives import all_reduce
from .mesh import Group


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


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The paper's f: replicated in, replicated out; backward sums partial gradients into a replicated one."""
    return x if group.size == 1 else _CopyToGroup.apply(x, group)  # type: ignore[no-untyped-call]


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The paper's g: partial in, replicated out (their sum); backward hands the replicated gradient on."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)  # type: ignore[no-untyped-call]
