"""Causal attention in training: over whole rows, or within the documents that are packed into them."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F

from ...model.attention import Attend, AttendingLayer
from .blocked_attention import blocked_or

_QUERIES: Final = 1024  # that see a window at once; half and twice as many were slower or no faster on a CPU


def causal_attention(
    at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
) -> torch.Tensor:
    """Computes causal attention within the rows, in the layer's window if it has one: [B, L, H, E] -> [B, L, H, E]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHE, k_BLKE, v_BLKE))
    window, length, grouped = at.window, q.shape[2], q.shape[1] > k.shape[1]
    if window is None or window >= length:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)
    parts = []
    for first, queries in enumerate(q.split(_QUERIES, dim=2)):  # time and memory grow with the length, not its square
        first *= _QUERIES
        begin, stop = max(0, first - window + 1), first + queries.shape[2]
        keys, values = k[:, :, begin:stop], v[:, :, begin:stop]
        seen = _seen(first - begin, queries.shape[2], keys.shape[2], window, q.device)
        parts.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=grouped))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _seen(first: int, num_queries: int, num_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Returns whether each query sees each key, bool [queries, keys]; `first` is the place of the first query."""
    places = torch.arange(num_keys, device=device)
    distances = places[first : first + num_queries].unsqueeze(-1) - places
    return (distances >= 0) & (distances < window)


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
