"""The kernels of attention that only GPUs have, as sums over what each query sees that torch computes anywhere."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tk.train.engine import gpu_attention
from tk.train.engine.gpu_attention import Heads


def varlen(heads_THE: Heads, ends: torch.Tensor, longest: int, window: int | None, scale: float) -> torch.Tensor:
    """Computes each document with a mask; the ends are read where the host has them."""
    values = getattr(ends, "held", ends).tolist()
    assert longest == max(stop - begin for begin, stop in pairwise(values))
    parts = []
    for begin, stop in pairwise(values):
        q, k, v = (each[begin:stop].transpose(0, 1) for each in heads_THE)
        place = torch.arange(stop - begin, device=q.device)
        distance = place.unsqueeze(-1) - place
        seen = (distance >= 0) & (distance < (window or longest))
        parts.append(masked(scale, q, k, v, seen).transpose(0, 1))
    return torch.cat(parts)


def flash(scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cudnn: bool) -> torch.Tensor:
    """Computes whole rows."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def masked(
    scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes with a mask, or whole rows."""
    causal = seen is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=True)


def efficient(
    scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes as `masked` does, what torch's kernel takes: as many kv heads as query heads."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    return masked(scale, q, k, v, seen)


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts these kernels in the place of the GPU's."""
    patch.setattr(gpu_attention, "varlen", varlen)
    patch.setattr(gpu_attention, "flash", flash)
    patch.setattr(gpu_attention, "efficient", efficient)
