"""Rotary position embedding (RoFormer, arXiv 2104.09864), with pairs (d, d + head_dim / 2) as in Hugging Face."""

import math

import torch

from .shape import RopeScaling
from .spec import Rope

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(positions_N: torch.Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> Rotation:
    """Returns cosines and sines for int64 positions [...], each [..., 1, head_dim] in `dtype`, computed in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_N.device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling is not None:
        frequencies = _scale(frequencies, rope.scaling)
    angles = positions_N.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scales frequencies as Llama 3 does: slow rotations are slowed by `factor`, fast ones kept, others in between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the context of pretraining
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x_NHD: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotates every pair (d, d + head_dim / 2) of every head [..., H, head_dim] by the angle of its position."""
    cos, sin = by
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos + torch.cat((-second, first), dim=-1) * sin
