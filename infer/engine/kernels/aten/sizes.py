"""The sizes of a rank's memory beside its weights on torch, without torch: of its cache, and of the rows of a step."""

from typing import Final

from ...kv_formats import BlockBytes, CacheShape, kv_format
from ...options import MAX_HEAD_ROWS
from ...program.lower import Program
from ...program.operations import Head
from ..sampler.block import scratch_bytes

_FLOAT: Final = 4  # bytes, at most, of an activation


def block_bytes(program: Program, cache: CacheShape) -> BlockBytes:
    """Returns the bytes of a block of the cache and of its twin."""
    kind, vectors = kv_format(cache.dtype), program.num_layers * program.num_kv_heads * cache.block_size
    return BlockBytes(vectors * kind.num_bytes(program.head_dim), vectors * kind.twin_bytes(program.head_dim))


def buffer_bytes(
    program: Program,
    cache: CacheShape,
    max_tokens: int,
    threads: int,
    weight_dtype: str = "auto",
    adapter_rank: int = 0,
) -> int:
    """Returns the bytes of the rows of a step, of its logits, which are joined, and of the sampler's memory.

    Args:
        program: the program of rank 0, which samples.
        cache, threads, weight_dtype, adapter_rank: see `native/sizes.py`; they do not count.
        max_tokens: the largest number of tokens of a step.
    """
    head = next(each.matrix for each in program.operations if isinstance(each, Head))
    logits = min(MAX_HEAD_ROWS, max_tokens) * 2 * program.tp * head.out_features
    return _FLOAT * (max_tokens * sum(program.row_widths.values()) + logits) + scratch_bytes(program.vocab_size)
