"""Attention of context-parallel ranks that exchange positions for heads (DeepSpeed Ulysses, arXiv 2309.14509).

Each rank computes some heads of all positions. If there are fewer kv heads than ranks, kv heads are repeated, so that
each rank has those of its query heads.

Letters: B rows, L positions of this rank, N = B L, C ranks, P = C N positions of all ranks, H query heads, K kv heads,
E head dim; h and k are a rank's share of heads.
"""

from dataclasses import replace
from math import lcm

import numpy as np
import torch

from ...model.attention import AttendingLayer
from ...parallel.mesh import Group
from ...parallel.row_exchange import RowExchange, dispatch_rows, return_rows
from ...parallel.streams import sent
from .dealing import Dealing
from .tiled_attention import OwnKeys, tiled_attention
from .tiles import tiles


class UlyssesAttention:
    """An `Attend` of dealt rows that exchanges positions for heads.

    Args:
        dealing: the positions of each rank.
        group: the context-parallel ranks.
        scale: the factor of scores; None for 1 / sqrt(E).
    """

    def __init__(self, dealing: Dealing, group: Group, scale: float | None = None) -> None:
        self._group, self._scale = group, scale
        self._whole = replace(dealing, runs=((range(dealing.num_positions),),))
        arriving_P = np.concatenate([dealing.positions(rank).reshape(-1) for rank in range(group.size)])
        self._order_P = torch.from_numpy(arriving_P.argsort())
        self._keys: dict[int | None, OwnKeys] = {}

    def __call__(
        self, at: AttendingLayer, q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor
    ) -> torch.Tensor:
        """Returns the outputs [B, L, H, E]; every rank calls it for the same layers in the same order.

        The number of ranks divides that of query heads.
        """
        cp, num_kv_heads = self._group.size, k_BLKE.shape[-2]
        repeats = lcm(num_kv_heads, cp) // num_kv_heads
        if repeats > 1:
            k_BLKE, v_BLKE = (each.repeat_interleave(repeats, dim=-2) for each in (k_BLKE, v_BLKE))
        counts = [q_BLHE.shape[0] * q_BLHE.shape[1]] * cp
        exchange = RowExchange(self._group, counts, counts, sent(self._order_P, q_BLHE.device))
        shares = [each.flatten(0, 1).unflatten(1, (cp, -1)) for each in (q_BLHE, k_BLKE, v_BLKE)]
        sent_CNFE = torch.cat(shares, dim=2).transpose(0, 1)
        rows_PFE = dispatch_rows(sent_CNFE.flatten(0, 1), exchange)
        q_PhE, k_PkE, v_PkE = rows_PFE.split([each.shape[2] for each in shares], dim=1)
        out_PhE = tiled_attention(q_PhE, k_PkE, v_PkE, self._keys_of(at.window), self._scale)
        out_CNhE = return_rows(out_PhE, exchange).view(cp, -1, *out_PhE.shape[1:])
        return out_CNhE.transpose(0, 1).reshape(q_BLHE.shape)

    def _keys_of(self, window: int | None) -> OwnKeys:
        if window not in self._keys:
            self._keys[window] = OwnKeys(tiles(self._whole, 0, window))
        return self._keys[window]
