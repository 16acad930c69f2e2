"""Rotary position embedding (RoFormer, arXiv 2104.09864), with pairs (d, d + R / 2) of R dims as in Hugging Face."""

import torch

from .spec import Rope

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(positions_N: torch.Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> Rotation:
    """Returns cosines and sines for int64 positions [...], each [..., 1, rotated dims] in `dtype`, computed in fp32."""
    angles = positions_N.float().unsqueeze(-1) * frequencies(rope, head_dim, positions_N.device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_scaling != 1:
        cos, sin = cos * rope.attention_scaling, sin * rope.attention_scaling
    return cos.to(dtype), sin.to(dtype)


def frequencies(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Returns the radians per position of every pair: fp32 [rotated dims / 2]."""
    rotated = rope.rotated(head_dim)
    pairs_P = torch.arange(rotated // 2, dtype=torch.float32, device=device)
    periods_P = rope.theta ** (2 * pairs_P / rotated)
    return 1.0 / periods_P if rope.scaling is None else rope.scaling.frequencies(periods_P, pairs_P, rope.theta)


def rotate(x_NHD: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotates every pair (d, d + R / 2) of the first R dims of every head [..., H, head_dim] by the angle of `by`."""
    cos, sin = by
    turned, kept = x_NHD[..., : cos.shape[-1]], x_NHD[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned
