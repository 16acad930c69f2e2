"""Causal attention over the paged cache; the bits of its result depend only on the tokens up to a query.

Keys and values are read in tiles of 256 tokens from the sequence's start, queries of a kv head in tiles of 16 rows. So
every product has the same shape for any batch and any cut of a prompt into chunks. An fp32 online softmax (Milakov and
Gimelshein, arXiv 1805.02867; tiles as in FlashAttention, arXiv 2205.14135) merges the tiles of a row in order. A tile
that is hidden from a row changes none of its bits.

Letters: T tokens, H query heads, K kv heads, G = H / K, E head dim, S decoding sequences, Q query tiles, R = 16 rows,
C = 256 keys, N independent problems (kv heads of one sequence or of several).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .....core.casts import Array
from .....core.integers import ceil_div, round_up
from ...options import ATTENTION_TILE
from ...step.running_plan import TokenSpan
from .kv_cache import KVCache
from .online_softmax import QUERY_ROWS, KeyTiles, OnlineSoftmax, Partial, attend_to_tiles, query_tiles

_MAX_READ: Final = 2**23  # the most elements of keys, in fp32, that decoding gathers at once


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Consecutive tiles of all decoding sequences that reach them, multiplied together and merged in order.

    Attributes:
        counts: for each tile, the number of sequences that reach it; these are the first ones.
        sequence: the sequence of each (tile, sequence) pair.
        blocks: the blocks of each pair.
        hidden, near: the masks of the keys that each pair must not see, and of those that it reads from twins.
    """

    counts: tuple[int, ...]
    sequence: torch.Tensor
    blocks: torch.Tensor
    hidden: torch.Tensor
    near: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A span of several tokens.

    Attributes:
        first: the index of its first token among the packed tokens.
        length: the number of its tokens.
        positions_QR: the position of each query row.
        first_tile: the first tile that a query of the span sees.
        tiles: the blocks of each tile.
        unseeing: for each tile, the number of query tiles that end before it; these are the first ones.
    """

    first: int
    length: int
    positions_QR: torch.Tensor
    first_tile: int
    tiles: torch.Tensor
    unseeing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of one forward pass for all layers with the same window.

    Attributes:
        decoding: the spans of one token, longest context first, by their tokens; None without any.
        groups: the tiles of these.
        prefills: the other spans.
    """

    decoding: torch.Tensor | None
    groups: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]


class PagedAttention:
    """The attention of one forward pass, planned once for all layers with the same window.

    Args:
        cache: the rank's KV cache.
        spans: the spans of the pass's tokens; tokens outside of them are padding and get zeros.
        slots: the cache slots of the tokens' keys and values (see RunningPlan), without padding.
        num_heads: the number of query heads on this rank.
    """

    def __init__(self, cache: KVCache, spans: Sequence[TokenSpan], slots: Array, num_heads: int) -> None:
        self.cache = cache
        self.device, self.num_kv_heads, self.head_dim = cache.device, cache.num_kv_heads, cache.head_dim
        self.group = num_heads // cache.num_kv_heads
        self.blocks_per_tile = ATTENTION_TILE // cache.block_size
        self.num_tokens = len(slots)
        self.places = cache.places(slots)
        self.spans = tuple(spans)
        self._plans: dict[int | None, _Plan] = {}

    def append(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> None:
        """Stores the tokens' keys and values in a layer's cache, without those of padding."""
        self.cache.append(layer, self.places, k_TKE[: self.num_tokens], v_TKE[: self.num_tokens])

    def attend(self, layer: int, window: int | None, q_THE: torch.Tensor) -> torch.Tensor:
        """Attends to a layer's cache; returns [T, H, E] in the queries' dtype.

        Args:
            layer: the layer, to whose cache the tokens are appended already.
            window: the number of positions that a query sees, its own included; None for all before it.
            q_THE: the queries, normed and rotated.
        """
        plan = self._plans.get(window) or self._plans.setdefault(window, self._plan(window))
        q_TKGE = (self.cache.rotate(q_THE).float() * self.head_dim**-0.5).unflatten(1, (self.num_kv_heads, self.group))
        out_TKGE = torch.zeros_like(q_TKGE)
        if plan.decoding is not None:
            out_TKGE[plan.decoding] = self._decoded(layer, plan.groups, q_TKGE[plan.decoding])
        for span in plan.prefills:
            tokens = slice(span.first, span.first + span.length)
            out_TKGE[tokens] = self._prefilled(layer, span, window, q_TKGE[tokens])
        return self.cache.rotate(out_TKGE).flatten(1, 2).to(q_THE.dtype)

    def _plan(self, window: int | None) -> _Plan:
        single = sorted((span for span in self.spans if span.stop - span.start == 1), key=lambda span: -span.stop)
        prefills = tuple(self._plan_prefill(span, window) for span in self.spans if span.stop - span.start > 1)
        if not single:
            return _Plan(None, (), prefills)
        return _Plan(self._tensor([span.first for span in single]), self._plan_groups(single, window), prefills)

    def _plan_groups(self, spans: Sequence[TokenSpan], window: int | None) -> tuple[_DecodeGroup, ...]:
        tables = [self._tiles(span) for span in spans]
        limit = max(1, _MAX_READ // (ATTENTION_TILE * self.num_kv_heads * self.head_dim))
        groups: list[_DecodeGroup] = []
        pairs: list[tuple[int, int]] = []  # (tile, sequence)
        for tile in range(_first_tile(spans[-1].stop - 1, window), len(tables[0])):
            here = [(tile, i) for i, table in enumerate(tables) if tile < len(table)]
            if pairs and len(pairs) + len(here) > limit:
                groups.append(self._plan_group(spans, tables, pairs, window))
                pairs = []
            pairs += here
        groups.append(self._plan_group(spans, tables, pairs, window))
        return tuple(groups)

    def _plan_group(
        self,
        spans: Sequence[TokenSpan],
        tables: Sequence[torch.Tensor],
        pairs: Sequence[tuple[int, int]],
        window: int | None,
    ) -> _DecodeGroup:
        tiles = [tile for tile, _ in pairs]
        query_P = self._tensor([spans[i].stop - 1 - tile * ATTENTION_TILE for tile, i in pairs])
        keys_C, query_P1 = torch.arange(ATTENTION_TILE, device=self.device), query_P.unsqueeze(-1)
        hidden_PC = _hidden(keys_C, query_P1, window)
        near_PC = self._near(keys_C, query_P1, self._tensor(tiles).unsqueeze(-1))
        return _DecodeGroup(
            counts=tuple(tiles.count(tile) for tile in range(tiles[0], tiles[-1] + 1)),
            sequence=self._tensor([i for _, i in pairs]),
            blocks=torch.stack([tables[i][tile] for tile, i in pairs]),
            hidden=hidden_PC.repeat_interleave(self.num_kv_heads, dim=0)[:, None, None, :],
            near=near_PC.repeat_interleave(self.num_kv_heads, dim=0)[:, None, None, :],
        )

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        """Copies numbers to the device."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.device)

    def _near(self, keys: torch.Tensor, query: torch.Tensor, tile: torch.Tensor | int) -> torch.Tensor:
        """Returns the mask of the keys of a tile in a query's own block, or in the first one of their sequence.

        Positions are counted from the start of any tile.
        """
        size = self.cache.block_size
        return (keys // size == query // size) | (keys < size) & (tile == 0)

    def _plan_prefill(self, span: TokenSpan, window: int | None) -> _Prefill:
        length = span.stop - span.start
        num_rows = round_up(length * self.group, QUERY_ROWS)
        positions = (span.start + torch.arange(num_rows, device=self.device) // self.group).clamp_max(span.stop - 1)
        first_tile, tiles = _first_tile(span.start, window), self._tiles(span)
        # the last row of query tile i has the position span.start + ((i + 1) * QUERY_ROWS - 1) // group
        unseeing = tuple(
            max(0, (begin - span.start) * self.group) // QUERY_ROWS
            for begin in range(0, len(tiles) * ATTENTION_TILE, ATTENTION_TILE)
        )
        return _Prefill(span.first, length, positions.view(-1, QUERY_ROWS), first_tile, tiles, unseeing)

    def _read(self, layer: int, blocks_PN: torch.Tensor) -> KeyTiles:
        keys, values = self.cache.read(layer, self.cache.pages(blocks_PN), self.blocks_per_tile)
        if not self.cache.has_twins:
            return KeyTiles(keys, values)
        return KeyTiles(keys, values, *self.cache.read_twins(layer, self.cache.twins(blocks_PN), self.blocks_per_tile))

    def _tiles(self, span: TokenSpan) -> torch.Tensor:
        """Cuts the block table into tiles, [tiles, blocks per tile], padded with the null block."""
        num_tiles = ceil_div(span.stop, ATTENTION_TILE)
        used = ceil_div(span.stop, self.cache.block_size)
        table = torch.zeros(num_tiles * self.blocks_per_tile, dtype=torch.int64)
        table[:used] = torch.from_numpy(span.block_table[:used].astype("int64"))
        return table.view(num_tiles, self.blocks_per_tile).to(self.device)

    def _decoded(self, layer: int, groups: Sequence[_DecodeGroup], q_SKGE: torch.Tensor) -> torch.Tensor:
        """Returns the attention of the decoding sequences, [S, K, G, E]."""
        q_SKQRE = query_tiles(q_SKGE)
        softmax = OnlineSoftmax()
        for part in groups:
            queries = q_SKQRE[part.sequence].flatten(0, 1)
            partial = attend_to_tiles(queries, self._read(layer, part.blocks), part.hidden, part.near)
            done = 0
            for count in part.counts:
                rows = slice(done * self.num_kv_heads, (done + count) * self.num_kv_heads)
                own = Partial(partial.largest[rows], partial.total[rows], partial.values[rows])
                softmax.merge(own, (slice(count * self.num_kv_heads),))
                done += count
        rows_SKNE = softmax.result().flatten(1, 2).unflatten(0, (-1, self.num_kv_heads))
        decoded: torch.Tensor = rows_SKNE[:, :, : self.group]
        return decoded

    def _prefilled(self, layer: int, plan: _Prefill, window: int | None, q_TKGE: torch.Tensor) -> torch.Tensor:
        """Returns the attention of a span of T tokens, [T, K, G, E]."""
        q_KQRE = query_tiles(q_TKGE.transpose(0, 1).flatten(1, 2))
        softmax = OnlineSoftmax()
        for tile, blocks in enumerate(plan.tiles[plan.first_tile :], plan.first_tile):
            begin = tile * ATTENTION_TILE
            unseeing = plan.unseeing[tile]
            keys_C = begin + torch.arange(ATTENTION_TILE, device=self.device)
            query_QR1 = plan.positions_QR[unseeing:].unsqueeze(-1)
            hidden_QRC = _hidden(keys_C, query_QR1, window)
            near_QRC = self._near(keys_C, query_QR1, tile)
            partial = attend_to_tiles(
                q_KQRE[:, unseeing:], self._read(layer, blocks.unsqueeze(0)), hidden_QRC, near_QRC
            )
            softmax.merge(partial, (slice(None), slice(unseeing, None)))
        rows_KNE = softmax.result().flatten(1, 2)[:, : plan.length * self.group]
        prefilled: torch.Tensor = rows_KNE.unflatten(1, (plan.length, self.group)).transpose(0, 1)
        return prefilled


def _hidden(keys: torch.Tensor, query: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns the mask of the key positions that a query position must not see."""
    hidden = keys > query
    return hidden if window is None else hidden | (keys <= query - window)


def _first_tile(query: int, window: int | None) -> int:
    """Returns the first tile that a query at that position sees; leaving out earlier tiles changes no bit."""
    return 0 if window is None else max(0, query - window + 1) // ATTENTION_TILE
