"""Products of groups of rows, each with a weight of its own, as the experts of a layer multiply their tokens.

Letters: P rows in all groups, E groups, D in features, F out features.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from .products import in_fp32, matmul

_ALIGNED: Final = 16  # bytes: the rows of torch's operands begin at multiples of it


def grouped_linear(x_PD: torch.Tensor, weight_EFD: torch.Tensor, counts_E: Sequence[int]) -> torch.Tensor:
    """Returns x W^T of each group, [P, F]. Without any rows it has a gradient, too: zeros for every weight.

    Args:
        x_PD: the rows of the first group, then those of the second one, and so on.
        weight_EFD: the weight of each group, of the rows' dtype.
        counts_E: the number of rows of each group; their sum is P.
    """
    y_PF: torch.Tensor = _GroupedLinear.apply(x_PD, weight_EFD, tuple(counts_E))  # type: ignore[no-untyped-call]
    return y_PF


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: torch.Tensor, weight_EFD: torch.Tensor, counts_E: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(x_PD, weight_EFD)
        ctx.counts_E = counts_E
        return _products(x_PD, weight_EFD.transpose(1, 2), counts_E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_PD, weight_EFD = ctx.saved_tensors
        grad_PF = grads[0].contiguous()
        grad_PD = _products(grad_PF, weight_EFD, ctx.counts_E) if ctx.needs_input_grad[0] else None
        grad_EFD = _outer_products(grad_PF, x_PD, ctx.counts_E) if ctx.needs_input_grad[1] else None
        return grad_PD, grad_EFD, None


def _products(rows_PX: torch.Tensor, weight_EXY: torch.Tensor, counts_E: tuple[int, ...]) -> torch.Tensor:
    """Returns the product of each group's rows and weight, [P, Y]."""
    if _fits_kernel(rows_PX, weight_EXY):
        return F.grouped_mm(rows_PX, weight_EXY, offs=_ends(counts_E, rows_PX.device))
    groups = zip(rows_PX.split(counts_E), weight_EXY, strict=True)
    return torch.cat([matmul(rows, weight_XY) for rows, weight_XY in groups])


def _outer_products(left_PX: torch.Tensor, right_PY: torch.Tensor, counts_E: tuple[int, ...]) -> torch.Tensor:
    """Returns the sum over each group's rows of their outer products, [E, X, Y]."""
    if _fits_kernel(left_PX, right_PY):
        return F.grouped_mm(left_PX.t(), right_PY, offs=_ends(counts_E, left_PX.device))
    groups = zip(left_PX.split(counts_E), right_PY.split(counts_E), strict=True)
    return torch.stack([matmul(left.t(), right) for left, right in groups])


def _fits_kernel(rows_PX: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether torch's product of all groups takes the operands: aligned rows, and at least one.

    Other devices than CPUs multiply group by group: there torch's takes bf16 alone, and none of ours has run it.
    """
    if rows_PX.device.type != "cpu" or in_fp32(rows_PX) or not len(rows_PX):
        return False
    return not any(tensor.shape[-1] * tensor.itemsize % _ALIGNED for tensor in (rows_PX, other))


def _ends(counts_E: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts_E, device=device).cumsum(0).int()
