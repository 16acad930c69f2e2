"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split orientation of Hugging Face's files."""

import math

import torch

from .shape import RopeScaling
from .spec import Rope

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(positions_N: torch.Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> Rotation:
    """Cosines and sines for int64 positions [...]: each [..., 1, head_dim] in `dtype`, computed in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_N.device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling is not None:
        frequencies = _stretch(frequencies, rope.scaling)
    angles = positions_N.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3: rotations slower than the first context are slowed by `factor`, fast ones kept, others in between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the first context
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x_NHD: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turns every pair (d, d + head_dim / 2) of every head by its position's angle."""
    cos, sin = by
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos + torch.cat((-second, first), dim=-1) * sin
