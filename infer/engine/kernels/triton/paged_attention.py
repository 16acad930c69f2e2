"""The launches of attention: for the spans of a step, and split over keys for spans of one token.

A span of one token has the same bits at any place of any batch, and so has a token of a longer span at any cut. The two
launches differ in their bits; where these must be the same, `attend` computes spans of one token, too.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import triton.language as tl

from .....core.casts import Array
from .....core.integers import ceil_div
from ..aten.kv_cache import KVCache
from .attention import AttentionShape, Spans, attention_kernel, merge_splits_kernel
from .cache import LayerPages
from .tilings import AttentionTiling, decode_tiling, prefill_tiling, split_keys, width_of

_NO_WINDOW: Final = 2**30  # positions: more than a sequence has
MOST_REGISTERS: Final = 255  # of a thread: the most that there are
COMPUTE: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def query_tiles(span_length: Array, tokens: int) -> Array:
    """Returns the tiles of the queries of spans (see `Spans.tiles`).

    Args:
        span_length: the tokens of each span, int [S].
        tokens: those of a tile: `LaunchedAttention.tokens`.
    """
    counts = ceil_div(span_length, tokens)
    span = np.repeat(np.arange(len(span_length), dtype=np.int32), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([span, (np.arange(len(span)) - before) * tokens], axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Memory for the splits of decoding, of all layers one after the other.

    Attributes:
        sums: fp32 [S, splits, H, E].
        statistics: fp32 [S, splits, H, 2], the maximum and the total.
    """

    sums: torch.Tensor
    statistics: torch.Tensor


class LaunchedAttention:
    """Attention over a rank's cache; its launches allocate nothing and wait for nothing.

    Args:
        cache: the cache, in the layout of the ATen backend.
        num_heads: the query heads of this rank.
        compute: the dtype of products' operands: that of queries on GPUs, fp32 in the interpreter for bf16.
        max_context: the most tokens of a sequence.

    Attributes:
        tokens: the tokens of a tile of `attend`.
        num_splits: the splits of `decode`.
    """

    def __init__(self, cache: KVCache, num_heads: int, compute: torch.dtype, max_context: int) -> None:
        dim, kv_heads = cache.head_dim, cache.num_kv_heads
        group = num_heads // kv_heads
        self._cache = cache
        self._prefill = prefill_tiling(dim, group, compute.itemsize, cache.has_twins, cache.block_size)
        self._decode = decode_tiling(dim, group, compute.itemsize, cache.has_twins)
        self._shape = AttentionShape(
            heads=num_heads,
            kv_heads=kv_heads,
            dim=dim,
            width=width_of(dim),
            size=cache.rotated_size,
            block=cache.block_size,
            rows=self._prefill.rows,
            keys=self._prefill.keys,
            split=0,
            compute=COMPUTE[compute],
        )
        split = split_keys(max_context)
        self._split_shape = replace(self._shape, rows=self._decode.rows, keys=self._decode.keys, split=split)
        self.tokens, self.num_splits = self._shape.tokens, ceil_div(max_context, split)

    def scratch(self, num_spans: int) -> SplitScratch:
        """Allocates the memory for `decode` of so many spans."""
        shape, device = (num_spans, self.num_splits, self._shape.heads), self._cache.device
        return SplitScratch(
            torch.empty((*shape, self._shape.dim), device=device), torch.empty((*shape, 2), device=device)
        )

    def attend(self, layer: int, window: int | None, query: torch.Tensor, out: torch.Tensor, spans: Spans) -> None:
        """Attends to a layer's cache, to which the step's keys are appended already.

        Args:
            layer: counted from 0.
            window: the number of positions that a query sees, its own included; None for all before it.
            query: the queries of `rotate_and_append`, [T, H E].
            out: gets the result, [T, H E].
            spans: the spans, with their tiles (see `query_tiles`).
        """
        grid = (len(spans.tiles), self._shape.kv_heads, 1)
        pages = LayerPages.of(self._cache, layer)
        attention_kernel[grid](
            query,
            out,
            None,
            spans,
            spans.tables.stride(0),
            pages,
            window or _NO_WINDOW,
            self._shape,
            **_options(self._prefill),
        )

    def decode(
        self,
        layer: int,
        window: int | None,
        query: torch.Tensor,
        out: torch.Tensor,
        spans: Spans,
        scratch: SplitScratch,
    ) -> None:
        """Does the same for spans of one token, with a program for each split of the keys; see `attend`."""
        pages, shape, seen = LayerPages.of(self._cache, layer), self._split_shape, window or _NO_WINDOW
        attention_kernel[(len(spans.tiles), shape.kv_heads, self.num_splits)](
            query,
            scratch.sums,
            scratch.statistics,
            spans,
            spans.tables.stride(0),
            pages,
            seen,
            shape,
            **_options(self._decode),
        )
        merge_splits_kernel[(len(spans.tiles), shape.heads)](
            scratch.sums, scratch.statistics, out, spans, seen, self.num_splits, shape, num_warps=1
        )


def _options(tiling: AttentionTiling) -> dict[str, int]:
    # With a limit of its own, ptxas does not spill for the sake of occupancy.
    return {"num_warps": tiling.warps, "num_stages": tiling.stages, "maxnreg": MOST_REGISTERS}
