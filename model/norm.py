"""Norms, computed in fp32 whatever the weights are kept in: RMSNorm (arXiv 1910.07467), LayerNorm (1607.06450)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _RMSNorm(torch.autograd.Function):
    """Its own backward: composed operators would keep and pass over several fp32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide_ND = x_ND.float()
        scale_N1 = torch.rsqrt(wide_ND.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        return weight_D * (wide_ND * scale_N1).to(x_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        normed_ND = x_ND.float() * scale_N1
        grad_ND = grads[0].float()
        product_ND = grad_ND * normed_ND
        grad_weight_D = product_ND.flatten(0, -2).sum(dim=0)
        mean_N1 = torch.matmul(product_ND, weight_D.float().unsqueeze(-1)) / x_ND.shape[-1]
        # Nothing in place on grad_ND: in fp32 it is the caller's own tensor.
        grad_x_ND = (grad_ND * weight_D.float()).sub_(normed_ND.mul_(mean_N1)).mul_(scale_N1)
        return grad_x_ND.to(x_ND.dtype), grad_weight_D.to(weight_D.dtype), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; the weight is replicated over tensor-parallel ranks."""

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D], same dtype."""
        return _RMSNorm.apply(x_ND, self.weight, self.eps)  # type: ignore[no-untyped-call, no-any-return]


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim; replicated over tensor-parallel ranks."""

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D], same dtype."""
        return F.layer_norm(x_ND, self.weight.shape, self.weight, self.bias, self.eps)
