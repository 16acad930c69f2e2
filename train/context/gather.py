"""Attention of context-parallel ranks that fetch keys: each computes all heads of its own queries.

Keys and values are fetched for some kv heads at a time, as in Llama 3's training (arXiv 2407.21783, section 3.3.2), but
only those that a rank's documents and window need. Backward fetches them again, so that none are kept.

Letters: B rows, L positions of this rank, N = B L, M fetched keys, H query heads, K kv heads, E head dim.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from ...core.integers import ceil_div
from ...model.attention import AttendingLayer
from ...parallel.collectives import PendingResult, start_all_to_all
from ...parallel.mesh import Group
from ...parallel.streams import sent
from .dealing import Dealing
from .fetching import Fetching, fetching
from .tiled_attention import tiled_attention


class KeyExchange:
    """The keys and values of the layers of one window, which move between ranks in forward and in backward.

    It is the `KeySource` of `tiled_attention`.

    Args:
        plan: the keys that this rank fetches, and those that it sends.
        group: the context-parallel ranks.
        device: the device of tensors.

    Attributes:
        tiles: the tiles of this rank's queries; keys are indexes among the fetched ones.
    """

    def __init__(self, plan: Fetching, group: Group, device: torch.device) -> None:
        self.tiles = plan.tiles
        self._group, self._most = group, plan.most
        self._sent = [sent(torch.from_numpy(each), device) for each in plan.sent]
        self._num_sent, self._num_received = [len(each) for each in plan.sent], plan.received
        self._order_M = sent(torch.from_numpy(plan.order), device)
        self._places_M = sent(torch.from_numpy(plan.order.argsort()), device)

    def head_groups(self, k_NKE: torch.Tensor) -> list[range]:
        """Returns the kv heads that are fetched together: no rank's take more memory than its own keys of all heads."""
        num_positions, num_heads = k_NKE.shape[:2]
        num_groups = ceil_div(num_heads, min(num_heads, max(1, num_heads * num_positions // self._most)))
        bounds = [num_heads * number // num_groups for number in range(num_groups + 1)]
        return [range(first, stop) for first, stop in pairwise(bounds)]

    def fetched(self, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> Iterator[tuple[range, torch.Tensor, torch.Tensor]]:
        """Yields kv heads with their fetched keys and values [M, heads, E], while the next heads' are on their way."""
        groups = self.head_groups(k_NKE)
        pending = self._start_fetch(k_NKE, v_NKE, groups[0])
        for number, heads in enumerate(groups):
            keys_M2KE = pending.wait()
            if number + 1 < len(groups):
                pending = self._start_fetch(k_NKE, v_NKE, groups[number + 1])
            yield heads, keys_M2KE[:, 0], keys_M2KE[:, 1]

    def start_return(self, dk_MKE: torch.Tensor, dv_MKE: torch.Tensor, like_NKE: torch.Tensor) -> PendingResult:
        """Starts to return gradients to the ranks of their keys; sums are in rank order. See KeySource."""
        grads_M2KE = torch.stack((dk_MKE, dv_MKE), dim=1)
        arrived = grads_M2KE.to(like_NKE.dtype).index_select(0, self._places_M)
        pending = start_all_to_all(arrived, self._num_received, self._num_sent, self._group)
        return pending.then(lambda arrived: self._sum(arrived, len(like_NKE)))

    def _start_fetch(self, k_NKE: torch.Tensor, v_NKE: torch.Tensor, heads: range) -> PendingResult:
        """Starts to fetch the keys and values of some heads: [M, 2, heads, E]."""
        rows, some = torch.cat(self._sent), slice(heads.start, heads.stop)
        keys_M2KE = torch.stack([each[:, some].index_select(0, rows) for each in (k_NKE, v_NKE)], dim=1)
        pending = start_all_to_all(keys_M2KE, self._num_sent, self._num_received, self._group)
        return pending.then(lambda arrived: arrived.index_select(0, self._order_M))

    def _sum(self, arrived: torch.Tensor, num_positions: int) -> torch.Tensor:
        total = arrived.new_zeros(num_positions, *arrived.shape[1:], dtype=torch.float32)
        for rows, part in zip(self._sent, arrived.split(self._num_sent), strict=True):
            total.index_add_(0, rows, part.float())
        return total


class GatheredAttention:
    """An `Attend` of dealt rows that fetches keys.

    Args:
        dealing: the positions of each rank.
        group: the context-parallel ranks.
        scale: the factor of scores; None for 1 / sqrt(E).
    """

    def __init__(self, dealing: Dealing, group: Group, scale: float | None = None) -> None:
        self._dealing, self._group, self._scale = dealing, group, scale
        self._exchanges: dict[int | None, KeyExchange] = {}

    def __call__(
        self, at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
    ) -> torch.Tensor:
        """Returns the outputs [B, L, H, E]; every rank calls it for the same layers in the same order."""
        if at.window not in self._exchanges:
            plan = fetching(self._dealing, self._group.rank, at.window)
            self._exchanges[at.window] = KeyExchange(plan, self._group, q_BLHE.device)
        q, k, v = (each.flatten(0, 1) for each in (q_BLHE, k_BLKE, v_BLKE))
        return tiled_attention(q, k, v, self._exchanges[at.window], self._scale).view(q_BLHE.shape)
