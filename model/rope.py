"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split orientation of Hugging Face's files."""

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(positions_N: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines for int64 positions [...]: each [..., 1, head_dim] in `dtype`, computed in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_N.device) / head_dim
    angles = positions_N.float().unsqueeze(-1) * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_NHD: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turns every pair (d, d + head_dim / 2) of every head by its position's angle."""
    cos, sin = by
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos + torch.cat((-second, first), dim=-1) * sin
