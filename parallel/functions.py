"""The conjugate collectives of tensor parallelism and of sequence parallelism as autograd functions (Megatron-LM, arXiv
1909.08053, section 3, and 2205.05198, section 4.2.2).

A tensor is *replicated* (every rank holds the same values), *partial* (the ranks' values sum to the whole one) or
*split* (each rank holds an equal part of the sequence, dim -2).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from ..core.integers import ceil_div
from .collectives import all_gather_dim, all_reduce, reduce_scatter_dim
from .mesh import Group

Transform: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

SEQUENCE = -2  # the dim of hidden states [..., L, D] that sequence parallelism splits


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Transform, back: Transform) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def conjugate(x: torch.Tensor, there: Transform, back: Transform) -> torch.Tensor:
    """Returns there(x), whose backward is `back`: a linear map on all ranks together, and its transpose."""
    return _Conjugate.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def _gather_and_scatter(group: Group) -> tuple[Transform, Transform]:
    """Returns the all-gather of a split tensor, and the reduce-scatter of a partial one."""
    return partial(all_gather_dim, dim=SEQUENCE, group=group), partial(reduce_scatter_dim, dim=SEQUENCE, group=group)


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
    whole = partial(_all_parts, length=x.shape[SEQUENCE], group=group)
    return conjugate(x, partial(_own_part, group=group), whole)


def collect_sequence(x: torch.Tensor, length: int, group: Group) -> torch.Tensor:
    """All-gathers a tensor that is split as by `deal_sequence`; backward takes this rank's part of the gradient.

    The gradient is replicated: every rank must compute the same from the result.
    """
    if group.size == 1:
        return x
    return conjugate(x, partial(_all_parts, length=length, group=group), partial(_own_part, group=group))


def enter_block(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """Makes the input of a tensor-parallel block replicated.

    Without sequence parallelism it is replicated already, and backward sums the partial gradients (all-reduce; f in
    the first paper). With it, a split input is all-gathered, and backward reduce-scatters the partial gradients (g in
    the second paper).
    """
    if group.size == 1:
        return x
    if not sequence_parallel:
        return conjugate(x, _same, partial(_summed, group=group))
    return conjugate(x, *_gather_and_scatter(group))


def leave_block(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """Sums the partial outputs of a tensor-parallel block.

    Without sequence parallelism the sum is replicated (all-reduce), and backward passes the replicated gradient on
    (g in the first paper). With it, the sum is split (reduce-scatter), and backward all-gathers the split gradient
    (g-bar in the second paper).
    """
    if group.size == 1:
        return x
    if not sequence_parallel:
        return conjugate(x, partial(_summed, group=group), _same)
    gather, scatter = _gather_and_scatter(group)
    return conjugate(x, scatter, gather)
