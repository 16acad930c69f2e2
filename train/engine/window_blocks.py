"""Attention in a window, for some queries at a time: time and memory grow with a row's length, not its square."""

from typing import Protocol

import torch


class MaskedAttention(Protocol):
    """Attention of heads [B, H, L, E] over the keys that a mask, bool [queries, keys], shows to each query."""

    def __call__(
        self, q_BHLE: torch.Tensor, k_BKME: torch.Tensor, v_BKME: torch.Tensor, seen_LM: torch.Tensor, /
    ) -> torch.Tensor:
        """Returns the outputs [B, H, L, E]."""


def attend_in_window(
    q_BHLE: torch.Tensor, k_BKLE: torch.Tensor, v_BKLE: torch.Tensor, window: int, queries: int, attend: MaskedAttention
) -> torch.Tensor:
    """Computes causal attention in a window: [B, H, L, E].

    Args:
        window: the number of positions that a query sees, its own included.
        queries: how many queries see a mask at a time.
        attend: computes those.
    """
    parts = []
    for first, some in enumerate(q_BHLE.split(queries, dim=2)):
        first *= queries
        begin, stop = max(0, first - window + 1), first + some.shape[2]
        seen = _seen(first - begin, some.shape[2], stop - begin, window, some.device)
        parts.append(attend(some, k_BKLE[:, :, begin:stop], v_BKLE[:, :, begin:stop], seen))
    return torch.cat(parts, dim=2)


def _seen(first: int, num_queries: int, num_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Returns whether each query sees each key, bool [queries, keys]; `first` is the place of the first query."""
    places = torch.arange(num_keys, device=device)
    distances = places[first : first + num_queries].unsqueeze(-1) - places
    return (distances >= 0) & (distances < window)
