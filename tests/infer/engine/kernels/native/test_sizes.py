"""The sizes of a rank of native kernels: those of its allocations, of which a memory plan counts every one."""

from dataclasses import replace
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.shared_read import ALONE
from tk.infer.engine.kernels.native.buffers import RankBuffers
from tk.infer.engine.kernels.native.kv_cache import NativeCache
from tk.infer.engine.kernels.native.sizes import block_bytes, buffer_bytes
from tk.infer.engine.kernels.sampler.block import scratch_bytes
from tk.infer.engine.kv_formats import KV_DTYPES, CacheShape
from tk.infer.engine.program.lower import Program, lower
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.tiny_llama import TINY_LLAMA


def allocated(program: Program, cache: CacheShape, max_tokens: int, threads: int, weight_dtype: str) -> int:
    """Returns the bytes of the arrays that a rank allocates, but for the frequencies of rotary embedding."""
    buffers = RankBuffers(program, cache, max_tokens, threads, ALONE, weight_dtype)
    areas = (area for name, area in buffers._areas.items() if name != "frequencies")
    return sum(each.nbytes for each in (*buffers._rows.values(), *areas, buffers.results))


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(("max_tokens", "threads"), [(1, 1), (512, 3)])
@pytest.mark.parametrize("weight_dtype", ["auto", "int4"])
def test_the_plan_is_what_is_allocated(
    tmp_path: Path, name: str, max_tokens: int, threads: int, weight_dtype: str
) -> None:
    ENTRIES[name].make(tmp_path)
    program = lower(decoder_spec(stored_config(Checkpoint.open(tmp_path))))
    for kv_dtype in ("fp32", "int4"):
        cache = CacheShape(1, 16, kv_dtype)
        used = allocated(program, cache, max_tokens, threads, weight_dtype)
        used += threads * scratch_bytes(program.vocab_size)
        planned = buffer_bytes(program, cache, max_tokens, threads, weight_dtype)
        assert used <= planned <= 1.5 * used, "large areas are committed in whole pages"
        assert planned == used or max_tokens > 1


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_are_as_large_as_the_arrays_of_the_cache(tmp_path: Path, kv_dtype: str) -> None:
    ENTRIES["qwen3"].make(tmp_path)  # heads of 24
    program = lower(decoder_spec(stored_config(Checkpoint.open(tmp_path))))
    shape = CacheShape(9, 32, kv_dtype, num_twins=4)
    cache, sizes = NativeCache(program, shape), block_bytes(program, shape)
    assert (cache._blocks.shape, cache._twins.shape) == ((10, sizes.block), (5, sizes.twin))
    assert cache.num_bytes == cache._blocks.nbytes + cache._twins.nbytes


def test_the_logits_of_a_large_vocabulary_count() -> None:
    config = ModelConfig(**TINY_LLAMA | {"vocab_size": 100_000}, max_position_embeddings=640)
    program, cache = lower(decoder_spec(config)), CacheShape(0, 16, "fp32")
    logits, one = 4 * 64 * 100_000, buffer_bytes(program, cache, 512, 1)
    assert logits < one < 1.2 * logits
    assert buffer_bytes(program, cache, 512, 2) - one > 20 * 100_000, "the sampler's scratch"
    of_both = buffer_bytes(replace(program, tp=2), cache, 512, 1)
    assert of_both > 3.5 * logits, "of both ranks, and joined on the first"
