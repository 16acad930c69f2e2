"""The memory that a rank's kernels take beside weights: that of a block of the cache, and of a step."""

from ..kernels.aten import sizes as aten
from ..kernels.native import sizes as native
from ..kernels.triton.sizes import graph_bytes
from ..kv_formats import BlockBytes, CacheShape
from ..options import EngineOptions
from ..program.lower import Program
from .placement import on_gpus


def rank_buffers(
    program: Program, options: EngineOptions, cache: CacheShape, longest: int, weight_dtype: str
) -> tuple[BlockBytes, int]:
    """Returns the bytes of a block of the cache, and those of the buffers of a step, on one rank.

    Args:
        program: that of rank 0, which samples.
        options: the engine's.
        cache: its format and block size count.
        longest: the largest number of tokens of a sequence.
        weight_dtype: see EngineOptions, resolved.
    """
    on_torch = options.kernels in ("aten", "triton") or on_gpus(options)
    sizes, rank = aten if on_torch else native, options.max_adapter_rank if options.num_adapters else 0
    threads, max_tokens = options.threads_per_rank, options.max_batched_tokens
    beside = sizes.buffer_bytes(program, cache, max_tokens, threads, weight_dtype, rank)
    if on_torch and options.kernels != "aten":
        beside += graph_bytes(program, longest, options.block_size, options.max_running)
    return sizes.block_bytes(program, cache), beside
