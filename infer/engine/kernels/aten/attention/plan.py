"""The plan of the attention of a tile's tokens, as far as the host knows it before the first layer.

Its numbers travel with the others of the step (see `StepTensors`), so that no layer waits for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ......core.casts import Array
from ......core.integers import ceil_div
from ....options import ATTENTION_TILE
from ....step.running_plan import TokenSpan
from ...step_tensors import SentArray, StepTensors
from ..kv_cache import KVCache
from .online_softmax import QUERY_ROWS

_MAX_READ: Final = 2**23  # the most elements of keys, in fp32, that decoding gathers at once


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Consecutive tiles of all decoding sequences that reach them, multiplied together and merged in order.

    Attributes:
        counts: for each tile, the number of sequences that reach it; these are the first ones.
        tile: int64 [P], the tile of each (tile, sequence) pair.
        sequence: int64 [P], the sequence of each pair.
        query: int64 [P], the position of its query, counted from the tile's start.
        blocks: int64 [P, blocks per tile], the blocks of each pair.
    """

    counts: tuple[int, ...]
    tile: SentArray
    sequence: SentArray
    query: SentArray
    blocks: SentArray


@dataclass(frozen=True, slots=True)
class Prefill:
    """A span of several tokens.

    Attributes:
        first: the index of its first token among the packed tokens.
        length: the number of its tokens.
        start: the position of its first token.
        first_tile: the first tile that a query of the span sees.
        tiles: int64 [tiles, blocks per tile], the blocks of each tile.
        unseeing: for each tile, the number of query tiles that end before it; these are the first ones.
    """

    first: int
    length: int
    start: int
    first_tile: int
    tiles: SentArray
    unseeing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The plan of one forward pass for all layers with the same window.

    Attributes:
        decoding: the spans of one token, longest context first, by their tokens, int64 [S]; None without any.
        groups: the tiles of these.
        prefills: the other spans.
    """

    decoding: SentArray | None
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]


class AttentionPlanner:
    """Plans the attention of a forward pass.

    Args:
        cache: the rank's KV cache.
        spans: the spans of the pass's tokens.
        num_heads: the number of query heads on this rank.
        numbers: takes what the device needs.
    """

    def __init__(self, cache: KVCache, spans: Sequence[TokenSpan], num_heads: int, numbers: StepTensors) -> None:
        self._cache, self._numbers = cache, numbers
        self._group = num_heads // cache.num_kv_heads
        self._single = sorted((each for each in spans if each.stop - each.start == 1), key=lambda span: -span.stop)
        self._tables = [self._tiles(span) for span in self._single]
        several = [each for each in spans if each.stop - each.start > 1]
        self._several = [(span, numbers.add(self._tiles(span))) for span in several]
        self._decoding = numbers.add([span.first for span in self._single]) if self._single else None

    def plan(self, window: int | None) -> WindowPlan:
        """Returns the plan of layers with a window, before the numbers are sent."""
        prefills = tuple(self._prefill(span, tiles, window) for span, tiles in self._several)
        return WindowPlan(self._decoding, tuple(self._groups(window)) if self._single else (), prefills)

    def _groups(self, window: int | None) -> list[DecodeGroup]:
        limit = max(1, _MAX_READ // (ATTENTION_TILE * self._cache.num_kv_heads * self._cache.head_dim))
        groups: list[DecodeGroup] = []
        pairs: list[tuple[int, int]] = []  # (tile, sequence)
        for tile in range(_first_tile(self._single[-1].stop - 1, window), len(self._tables[0])):
            here = [(tile, i) for i, table in enumerate(self._tables) if tile < len(table)]
            if pairs and len(pairs) + len(here) > limit:
                groups.append(self._decode_group(pairs))
                pairs = []
            pairs += here
        groups.append(self._decode_group(pairs))
        return groups

    def _decode_group(self, pairs: Sequence[tuple[int, int]]) -> DecodeGroup:
        tiles, add = [tile for tile, _ in pairs], self._numbers.add
        return DecodeGroup(
            counts=tuple(tiles.count(tile) for tile in range(tiles[0], tiles[-1] + 1)),
            tile=add(tiles),
            sequence=add([i for _, i in pairs]),
            query=add([self._single[i].stop - 1 - tile * ATTENTION_TILE for tile, i in pairs]),
            blocks=add(np.stack([self._tables[i][tile] for tile, i in pairs])),
        )

    def _prefill(self, span: TokenSpan, tiles: SentArray, window: int | None) -> Prefill:
        # the last row of query tile i has the position span.start + ((i + 1) * QUERY_ROWS - 1) // group
        unseeing = tuple(
            max(0, (begin - span.start) * self._group) // QUERY_ROWS
            for begin in range(0, len(tiles.values) * ATTENTION_TILE, ATTENTION_TILE)
        )
        first_tile = _first_tile(span.start, window)
        return Prefill(span.first, span.stop - span.start, span.start, first_tile, tiles, unseeing)

    def _tiles(self, span: TokenSpan) -> Array:
        """Cuts the block table into tiles, [tiles, blocks per tile], padded with the null block."""
        blocks_per_tile = ATTENTION_TILE // self._cache.block_size
        used = ceil_div(span.stop, self._cache.block_size)
        table = np.zeros(ceil_div(span.stop, ATTENTION_TILE) * blocks_per_tile, np.int64)
        table[:used] = span.block_table[:used]
        return table.reshape(-1, blocks_per_tile)


def _first_tile(query: int, window: int | None) -> int:
    """Returns the first tile that a query at that position sees; leaving out earlier tiles changes no bit."""
    return 0 if window is None else max(0, query - window + 1) // ATTENTION_TILE
