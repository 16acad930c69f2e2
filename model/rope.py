"""Rotary position embedding (RoFormer, arXiv 2104.09864), with pairs (d, d + R / 2) of R dims as in Hugging Face."""

from typing import Any

import torch

from ..parallel import fusion
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
    if fusion.has_few_kernels(x_NHD) and not torch.compiler.is_compiling():
        return _Rotate.apply(x_NHD, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
    turned, kept = x_NHD[..., : cos.shape[-1]], x_NHD[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


class _Rotate(torch.autograd.Function):
    """The rotation in three kernels; backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_NHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_NHD, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(x_NHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Returns the rotation by the angle times 1 or -1."""
    size = cos.shape[-1]
    out = torch.empty_like(x_NHD, memory_format=torch.contiguous_format)
    torch.mul(x_NHD[..., :size], cos, out=out[..., :size])
    if size < x_NHD.shape[-1]:
        out[..., size:] = x_NHD[..., size:]
    (first, second), sines = x_NHD[..., :size].chunk(2, dim=-1), sin[..., : size // 2]
    turned_first, turned_second = out[..., :size].chunk(2, dim=-1)
    turned_first.addcmul_(second, sines, value=-sign)
    turned_second.addcmul_(first, sines, value=sign)
    return out
