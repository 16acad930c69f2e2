"""Norms, computed in fp32 for weights of any dtype: RMSNorm (arXiv 1910.07467) and LayerNorm (1607.06450)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel import fusion
from ..parallel.row_blocks import row_blocks
from ..parallel.wide_sums import layer_norm


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm with a backward of its own, block of rows by block of rows.

    Composed of torch's operators, it would keep several fp32 copies of the input and pass over each of them.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        x_TD = x_ND.reshape(-1, x_ND.shape[-1])
        y_TD, scale_T1 = torch.empty_like(x_TD), x_TD.new_empty(len(x_TD), 1, dtype=torch.float32)
        for rows in row_blocks(x_TD):
            wide_TD = x_TD[rows].float()
            scale_T1[rows] = torch.rsqrt(wide_TD.square().mean(dim=-1, keepdim=True) + eps)
            y_TD[rows] = weight_D * (wide_TD * scale_T1[rows]).to(x_TD.dtype)
        ctx.save_for_backward(x_ND, weight_D, scale_T1)
        return y_TD.view(x_ND.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_ND, weight_D, scale_T1 = ctx.saved_tensors
        x_TD, grad_TD = (each.reshape(-1, x_ND.shape[-1]) for each in (x_ND, grads[0]))
        wide_D = weight_D.float()
        grad_x_TD, grad_weight_D = torch.empty_like(x_TD), torch.zeros_like(wide_D)
        for rows in row_blocks(x_TD):
            normed_TD = x_TD[rows].float() * scale_T1[rows]
            weighted_TD = grad_TD[rows].float() * wide_D
            product_TD = weighted_TD * normed_TD
            mean_T1 = product_TD.mean(dim=-1, keepdim=True)
            grad_weight_D += (grad_TD[rows].float() * normed_TD).sum(dim=0)
            grad_x_TD[rows] = weighted_TD.sub_(normed_TD.mul_(mean_T1)).mul_(scale_T1[rows])
        return grad_x_TD.view(x_ND.shape), grad_weight_D.to(weight_D.dtype), None


def rms_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim, [..., D] -> [..., D] of the same dtype."""
    if fusion.has_few_kernels(x_ND):
        return F.rms_norm(x_ND, weight_D.shape, weight_D, eps)
    return _RMSNormFunction.apply(x_ND, weight_D, eps)  # type: ignore[no-untyped-call, no-any-return]


class RMSNorm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight over the last dim; tensor-parallel ranks hold equal weights."""

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Maps [..., D] to [..., D] of the same dtype."""
        return rms_norm(x_ND, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm, (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim.

    Tensor-parallel ranks hold equal weights.
    """

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Maps [..., D] to [..., D] of the same dtype."""
        return layer_norm(x_ND, self.weight, self.bias, self.eps)
