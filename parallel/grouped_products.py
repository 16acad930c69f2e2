"""Products of groups of rows, each with a weight of its own, as the experts of a layer multiply their tokens.

Letters: P rows in all groups, E groups, D in features, F out features.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F

from ..core.gpu_cards import gpu_features
from .products import in_fp32, matmul
from .row_groups import RowGroups

_ALIGNED: Final = 16  # bytes: the rows of torch's operands begin at multiples of it


def grouped_linear(x_PD: torch.Tensor, weight_EFD: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Returns x W^T of each group, [P, F]. Without any rows it has a gradient, too: zeros for every weight.

    Args:
        x_PD: the rows of the first group, then those of the second one, and so on.
        weight_EFD: the weight of each group, of the rows' dtype.
        groups: the E groups of all P rows.
    """
    y_PF: torch.Tensor = _GroupedLinear.apply(x_PD, weight_EFD, groups)  # type: ignore[no-untyped-call]
    return y_PF


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: torch.Tensor, weight_EFD: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(x_PD, weight_EFD)
        ctx.groups = groups
        return _products(x_PD, weight_EFD.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_PD, weight_EFD = ctx.saved_tensors
        grad_PF = grads[0].contiguous()
        grad_PD = _products(grad_PF, weight_EFD, ctx.groups) if ctx.needs_input_grad[0] else None
        grad_EFD = _outer_products(grad_PF, x_PD, ctx.groups) if ctx.needs_input_grad[1] else None
        return grad_PD, grad_EFD, None


def _products(rows_PX: torch.Tensor, weight_EXY: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Returns the product of each group's rows and weight, [P, Y]."""
    if fits_kernel(rows_PX, weight_EXY):
        return F.grouped_mm(rows_PX, weight_EXY, offs=groups.ends_E)
    pairs = zip(rows_PX.split(groups.counts), weight_EXY, strict=True)
    return torch.cat([matmul(rows, weight_XY) for rows, weight_XY in pairs])


def _outer_products(left_PX: torch.Tensor, right_PY: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Returns the sum over each group's rows of their outer products, [E, X, Y]."""
    if fits_kernel(left_PX, right_PY):
        return F.grouped_mm(left_PX.t(), right_PY, offs=groups.ends_E)
    pairs = zip(left_PX.split(groups.counts), right_PY.split(groups.counts), strict=True)
    return torch.stack([matmul(left.t(), right) for left, right in pairs])


def fits_kernel(rows_PX: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether torch's product of all groups takes the operands: aligned rows, and at least one.

    With CUDA it takes bf16 alone, on the devices of `gpu_features`. Elsewhere each group is multiplied by itself,
    for which the host waits until it knows their lengths.
    """
    if in_fp32(rows_PX) or not len(rows_PX):
        return False
    return _has_kernel(rows_PX.device, rows_PX.dtype) and not any(
        tensor.shape[-1] * tensor.itemsize % _ALIGNED for tensor in (rows_PX, other)
    )


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch multiplies all groups in one call."""
    if device.type == "cuda":
        return dtype == torch.bfloat16 and gpu_features(torch.cuda.get_device_capability(device)).grouped_mm
    return device.type == "cpu"
