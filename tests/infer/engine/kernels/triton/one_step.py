"""One layer's step through the kernels, in the interpreter, and what the ATen backend makes of the same heads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.triton.append import HeadWeights, rotate_and_append
from tk.infer.engine.kernels.triton.attention import Spans
from tk.infer.engine.kernels.triton.paged_attention import LaunchedAttention, query_tiles
from tk.infer.engine.step.running_plan import TokenSpan
from tk.model.norm import rms_norm
from tk.model.rope import rotate, rotation
from tk.model.spec import Rope
from tk.tests.infer.engine.kernels.triton.where import DEVICE, ON_GPU

BLOCK, NUM_BLOCKS, TABLE = 32, 48, 12  # tokens of a block, blocks of the cache, blocks of a sequence
MAX_CONTEXT: Final = TABLE * BLOCK


@dataclass(slots=True)
class Layer:
    """The heads of a layer and the two caches.

    Attributes:
        heads, kv_heads, dim: its heads.
        kv_dtype: the format of its cache.
        dtype: that of the model.
        rope: its rotary embedding.
        weights: those of its heads.
    """

    heads: int
    kv_heads: int
    dim: int
    kv_dtype: str
    dtype: torch.dtype = torch.float32
    rope: Rope | None = field(default_factory=lambda: Rope(theta=10000.0))
    weights: HeadWeights = field(default_factory=HeadWeights)

    def cache(self, num_twins: int = 0, device: torch.device = DEVICE) -> KVCache:
        """Returns an empty cache of one layer."""
        return KVCache(1, NUM_BLOCKS, self.kv_heads, BLOCK, self.dim, self.kv_dtype, num_twins, device)

    def draw(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """Returns random heads of queries, keys and values, [T, (H + 2 K) E]."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(num_tokens, (self.heads + 2 * self.kv_heads) * self.dim, generator=generator)
        return drawn.to(DEVICE, self.dtype)

    def rotation(self, positions: Array) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the cosines and sines of tokens, [T, rotated dims] each."""
        if self.rope is None:
            return None
        turns = rotation(torch.from_numpy(positions), self.dim, self.rope, self.dtype)
        cosines, sines = (each.squeeze(-2).contiguous().to(DEVICE) for each in turns)
        return cosines, sines

    def expected_heads(self, qkv: torch.Tensor, positions: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values [T, heads, E] as `aten/interpreter.py` makes them."""
        heads = qkv.unflatten(-1, (-1, self.dim))
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.weights.q_norm is not None:
            query = rms_norm(query, self.weights.q_norm.to(qkv.device), self.weights.eps)
            key = rms_norm(key, self.weights.k_norm.to(qkv.device), self.weights.eps)
        if self.rope is not None:
            turns = rotation(torch.from_numpy(positions), self.dim, self.rope, self.dtype)
            by = turns[0].to(qkv.device), turns[1].to(qkv.device)
            query, key = rotate(query, by), rotate(key, by)
        if self.weights.factors is not None:
            factors = self.weights.factors.to(qkv.device)
            query = query * factors.repeat_interleave(self.heads // self.kv_heads, dim=0)
            key = key / factors
        return query, key, value

    def appended(self, cache: KVCache, qkv: torch.Tensor, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Runs the kernel that stores keys and values; returns the queries, [T, H E]."""
        query = torch.full((len(qkv), self.heads * self.dim), torch.nan, dtype=self.dtype, device=DEVICE)
        turns, slots = self.rotation(positions_of(spans)), on_device(slots_of(spans))
        rotate_and_append(cache, 0, qkv, query, slots, turns, self.weights)
        return query

    def aten_appended(self, cache: KVCache, qkv: torch.Tensor, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Does the same in the ATen backend where the cache is; the queries are not rotated for the format."""
        query, key, value = self.expected_heads(qkv.to(cache.device), positions_of(spans))
        slots = torch.from_numpy(slots_of(spans)).to(cache.device)
        cache.append(0, cache.places(slots, slots[slots % BLOCK == 0] // BLOCK), key, value)
        return query


def on_device(values: Array) -> torch.Tensor:
    """Returns an array as a tensor where the tests compute."""
    return torch.from_numpy(values).to(DEVICE)


def positions_of(spans: Sequence[TokenSpan]) -> Array:
    """Returns the position of each packed token, int64."""
    return np.concatenate([np.arange(each.start, each.stop) for each in spans])


def slots_of(spans: Sequence[TokenSpan]) -> Array:
    """Returns the slot of each packed token, int64."""
    places = [(each.block_table, np.arange(each.start, each.stop)) for each in spans]
    return np.concatenate([table[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK for table, at in places])


def make_spans(bounds: Sequence[tuple[int, int]], seed: int = 0) -> list[TokenSpan]:
    """Returns spans [start, stop) of sequences that lie in random blocks."""
    free = np.random.default_rng(seed).permutation(NUM_BLOCKS).astype(np.int32) + 1
    spans, first = [], 0
    for i, (start, stop) in enumerate(bounds):
        spans.append(TokenSpan(first, start, stop, free[i * TABLE : (i + 1) * TABLE]))
        first += stop - start
    return spans


def as_tensors(spans: Sequence[TokenSpan], tokens: int) -> Spans:
    """Returns spans as the kernels take them, in tiles of so many tokens."""
    first, start, length = (
        np.array(each, np.int32)
        for each in zip(*((span.first, span.start, span.stop - span.start) for span in spans), strict=True)
    )
    tables = np.stack([span.block_table for span in spans])
    tiles = query_tiles(length, tokens)
    numbers = [on_device(each) for each in (tiles, first, start, length, tables)]
    return Spans(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])


def attention_of(layer: Layer, cache: KVCache) -> LaunchedAttention:
    """Returns the attention of a layer, whose products have operands that the interpreter multiplies rightly."""
    compute = torch.float32 if layer.dtype == torch.bfloat16 and not ON_GPU else layer.dtype
    return LaunchedAttention(cache, layer.heads, compute, MAX_CONTEXT)
