"""Causal attention in training: over whole rows, or within the documents that are packed into them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...model.attention import Attend, AttendingLayer
from .blocked_attention import blocked_or


def causal_attention(
    at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
) -> torch.Tensor:
    """Computes causal attention within the rows, in the layer's window if it has one: [B, L, H, E] -> [B, L, H, E]."""
    window, length, grouped = at.window, q_BLHE.shape[1], q_BLHE.shape[-2] > k_BLKE.shape[-2]
    seen = None
    if window is not None and window < length:
        place = torch.arange(length, device=q_BLHE.device)
        distance_LL = place.unsqueeze(-1) - place
        seen = (distance_LL >= 0) & (distance_LL < window)
    q, k, v = (x.transpose(1, 2) for x in (q_BLHE, k_BLKE, v_BLKE))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def attention_within(documents: Sequence[int]) -> Attend:
    """Returns causal attention within documents.

    Each document is computed by itself. That costs the sum of their squared lengths: on a CPU a fraction of the cost of
    whole rows with a mask. A native kernel computes what it can (`blocked_attention`).

    Args:
        documents: the documents' lengths over the flattened rows; () for rows that are one document each.
    """
    causal = blocked_or(causal_attention)
    if not documents:
        return causal

    def attend(at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor) -> torch.Tensor:
        pieces = (x.flatten(0, 1).unsqueeze(0).split(list(documents), 1) for x in (q_BLHE, k_BLKE, v_BLKE))
        out = [causal(at, q, k, v) for q, k, v in zip(*pieces, strict=True)]
        return torch.cat(out, 1).view_as(q_BLHE)

    return attend
