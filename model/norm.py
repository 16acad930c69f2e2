"""RMSNorm (arXiv 1910.07467), computed in fp32 whatever the weights are kept in."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; the weight is replicated over tensor-parallel ranks."""

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D], same dtype."""
        wide_ND = x_ND.float()
        scale_N1 = torch.rsqrt(wide_ND.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (wide_ND * scale_N1).to(x_ND.dtype)
