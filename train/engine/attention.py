"""Causal attention in training: over whole rows, or within the documents that are packed into them."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

from ...model.attention import Attend, AttendingLayer
from .blocked_attention import blocked_or
from .gpu_attention import GpuAttention, GpuFacts
from .window_blocks import attend_in_window

_QUERIES: Final = 1024  # that see a window at once; half and twice as many were slower or no faster on a CPU


def causal_attention(
    at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
) -> torch.Tensor:
    """Computes causal attention within the rows, in the layer's window if it has one: [B, L, H, E] -> [B, L, H, E]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHE, k_BLKE, v_BLKE))
    window, length, grouped = at.window, q.shape[2], q.shape[1] > k.shape[1]
    if window is None or window >= length:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = attend_in_window(q, k, v, window, _QUERIES, partial(_masked, grouped))
    return out.transpose(1, 2)


def _masked(grouped: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


def attention_within(documents: Sequence[int], gpu: GpuFacts | None = None) -> Attend:
    """Returns causal attention within documents.

    On a CPU each document is computed by itself. That costs the sum of their squared lengths: a fraction of the cost of
    whole rows with a mask. A native kernel computes what it can (`blocked_attention`).

    Args:
        documents: the documents' lengths over the flattened rows; () for rows that are one document each.
        gpu: the GPU that computes; None for a CPU.
    """
    if gpu is not None:
        return GpuAttention(gpu, documents)
    causal = blocked_or(causal_attention)
    if not documents:
        return causal

    def attend(at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor) -> torch.Tensor:
        pieces = (x.flatten(0, 1).unsqueeze(0).split(list(documents), 1) for x in (q_BLHE, k_BLKE, v_BLKE))
        out = [causal(at, q, k, v) for q, k, v in zip(*pieces, strict=True)]
        return torch.cat(out, 1).view_as(q_BLHE)

    return attend
