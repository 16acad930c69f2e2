"""Causal attention over the paged cache; the bits of its result depend only on the tokens up to a query.

Keys and values are read in tiles of 256 tokens from the sequence's start, queries of a kv head in tiles of 16 rows. So
every product has the same shape for any batch and any cut of a prompt into chunks. An fp32 online softmax (Milakov and
Gimelshein, arXiv 1805.02867; tiles as in FlashAttention, arXiv 2205.14135) merges the tiles of a row in order. A tile
that is hidden from a row changes none of its bits.

Letters: T tokens, H query heads, K kv heads, G = H / K, E head dim, S decoding sequences, Q query tiles, R = 16 rows,
C = 256 keys, N independent problems (kv heads of one sequence or of several).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .....core.casts import Array
from .....core.integers import round_up
from ...options import ATTENTION_TILE
from ...step.running_plan import TokenSpan
from ..step_tensors import StepTensors
from .attention.online_softmax import QUERY_ROWS, KeyTiles, OnlineSoftmax, Partial, attend_to_tiles, query_tiles
from .attention.plan import AttentionPlanner, DecodeGroup, Prefill, WindowPlan
from .kv_cache import KVCache, Places


@dataclass(frozen=True, slots=True)
class _DecodeMasks:
    """The masks of a group of decoding sequences, [P * K, 1, 1, C].

    Attributes:
        hidden: the keys that a query must not see.
        near: those that it reads from twins.
    """

    hidden: torch.Tensor
    near: torch.Tensor


class PagedAttention:
    """The attention of one forward pass, planned once for all layers with the same window.

    Args:
        cache: the rank's KV cache.
        spans: the spans of the pass's tokens; tokens outside of them are padding and get zeros.
        slots: the cache slots of the tokens' keys and values (see RunningPlan), without padding.
        num_heads: the number of query heads on this rank.
        windows: the windows of all layers (see `attend`).
        numbers: takes what the device needs; they are sent before the first layer appends its keys.
    """

    def __init__(
        self,
        cache: KVCache,
        spans: Sequence[TokenSpan],
        slots: Array,
        num_heads: int,
        windows: Iterable[int | None],
        numbers: StepTensors,
    ) -> None:
        self.cache = cache
        self.device, self.num_kv_heads, self.head_dim = cache.device, cache.num_kv_heads, cache.head_dim
        self.group = num_heads // cache.num_kv_heads
        self.blocks_per_tile = ATTENTION_TILE // cache.block_size
        self.num_tokens = len(slots)
        self._slots = numbers.add(slots)
        self._begun = numbers.add(slots[slots % cache.block_size == 0] // cache.block_size)
        self._places: tuple[Places, Places | None] | None = None
        planner = AttentionPlanner(cache, spans, num_heads, numbers)
        self._plans = {window: planner.plan(window) for window in windows}
        self._masks: dict[int | None, list[_DecodeMasks]] = {}

    def append(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> None:
        """Stores the tokens' keys and values in a layer's cache, without those of padding."""
        if self._places is None:
            self._places = self.cache.places(self._slots.tensor, self._begun.tensor)
        self.cache.append(layer, self._places, k_TKE[: self.num_tokens], v_TKE[: self.num_tokens])

    def attend(self, layer: int, window: int | None, q_THE: torch.Tensor) -> torch.Tensor:
        """Attends to a layer's cache; returns [T, H, E] in the queries' dtype.

        Args:
            layer: the layer, to whose cache the tokens are appended already.
            window: the number of positions that a query sees, its own included; None for all before it.
            q_THE: the queries, normed and rotated.
        """
        plan = self._plans[window]
        q_TKGE = (self.cache.rotate(q_THE).float() * self.head_dim**-0.5).unflatten(1, (self.num_kv_heads, self.group))
        out_TKGE = torch.zeros_like(q_TKGE)
        if plan.decoding is not None:
            tokens = plan.decoding.tensor
            out_TKGE[tokens] = self._decoded(layer, plan, window, q_TKGE[tokens])
        for span in plan.prefills:
            places = slice(span.first, span.first + span.length)
            out_TKGE[places] = self._prefilled(layer, span, window, q_TKGE[places])
        return self.cache.rotate(out_TKGE).flatten(1, 2).to(q_THE.dtype)

    def _masks_of(self, groups: Sequence[DecodeGroup], window: int | None) -> list[_DecodeMasks]:
        """Returns the masks of decoding sequences, which all layers with the window share."""
        if window not in self._masks:
            self._masks[window] = [self._masks_of_group(each, window) for each in groups]
        return self._masks[window]

    def _masks_of_group(self, group: DecodeGroup, window: int | None) -> _DecodeMasks:
        keys_C, query_P1 = torch.arange(ATTENTION_TILE, device=self.device), group.query.tensor.unsqueeze(-1)
        masks = _hidden(keys_C, query_P1, window), self._near(keys_C, query_P1, group.tile.tensor.unsqueeze(-1))
        return _DecodeMasks(*(each.repeat_interleave(self.num_kv_heads, dim=0)[:, None, None, :] for each in masks))

    def _near(self, keys: torch.Tensor, query: torch.Tensor, tile: torch.Tensor | int) -> torch.Tensor:
        """Returns the mask of the keys of a tile in a query's own block, or in the first one of their sequence.

        Positions are counted from the start of any tile.
        """
        size = self.cache.block_size
        return (keys // size == query // size) | (keys < size) & (tile == 0)

    def _read(self, layer: int, blocks_PN: torch.Tensor) -> KeyTiles:
        keys, values = self.cache.read(layer, self.cache.pages(blocks_PN), self.blocks_per_tile)
        if not self.cache.has_twins:
            return KeyTiles(keys, values)
        return KeyTiles(keys, values, *self.cache.read_twins(layer, self.cache.twins(blocks_PN), self.blocks_per_tile))

    def _decoded(self, layer: int, plan: WindowPlan, window: int | None, q_SKGE: torch.Tensor) -> torch.Tensor:
        """Returns the attention of the decoding sequences, [S, K, G, E]."""
        q_SKQRE = query_tiles(q_SKGE)
        softmax = OnlineSoftmax()
        for part, masks in zip(plan.groups, self._masks_of(plan.groups, window), strict=True):
            queries = q_SKQRE[part.sequence.tensor].flatten(0, 1)
            partial = attend_to_tiles(queries, self._read(layer, part.blocks.tensor), masks.hidden, masks.near)
            done = 0
            for count in part.counts:
                rows = slice(done * self.num_kv_heads, (done + count) * self.num_kv_heads)
                own = Partial(partial.largest[rows], partial.total[rows], partial.values[rows])
                softmax.merge(own, (slice(count * self.num_kv_heads),))
                done += count
        rows_SKNE = softmax.result().flatten(1, 2).unflatten(0, (-1, self.num_kv_heads))
        decoded: torch.Tensor = rows_SKNE[:, :, : self.group]
        return decoded

    def _prefilled(self, layer: int, plan: Prefill, window: int | None, q_TKGE: torch.Tensor) -> torch.Tensor:
        """Returns the attention of a span of T tokens, [T, K, G, E]."""
        q_KQRE = query_tiles(q_TKGE.transpose(0, 1).flatten(1, 2))
        positions_QR, softmax = self._positions(plan), OnlineSoftmax()
        for tile, blocks in enumerate(plan.tiles.tensor[plan.first_tile :], plan.first_tile):
            begin = tile * ATTENTION_TILE
            unseeing = plan.unseeing[tile]
            keys_C = begin + torch.arange(ATTENTION_TILE, device=self.device)
            query_QR1 = positions_QR[unseeing:].unsqueeze(-1)
            hidden_QRC = _hidden(keys_C, query_QR1, window)
            near_QRC = self._near(keys_C, query_QR1, tile)
            partial = attend_to_tiles(
                q_KQRE[:, unseeing:], self._read(layer, blocks.unsqueeze(0)), hidden_QRC, near_QRC
            )
            softmax.merge(partial, (slice(None), slice(unseeing, None)))
        rows_KNE = softmax.result().flatten(1, 2)[:, : plan.length * self.group]
        prefilled: torch.Tensor = rows_KNE.unflatten(1, (plan.length, self.group)).transpose(0, 1)
        return prefilled

    def _positions(self, span: Prefill) -> torch.Tensor:
        """Returns the position of each query row of a span, [Q, R]; those of padding are the last one's."""
        num_rows = round_up(span.length * self.group, QUERY_ROWS)
        tokens = torch.arange(num_rows, device=self.device) // self.group
        return span.start + tokens.clamp_max(span.length - 1).view(-1, QUERY_ROWS)


def _hidden(keys: torch.Tensor, query: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns the mask of the key positions that a query position must not see."""
    hidden = keys > query
    return hidden if window is None else hidden | (keys <= query - window)
