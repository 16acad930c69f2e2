"""The sizes of a rank on torch: the cache takes as much as the memory plan counts."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.aten.sizes import block_bytes, buffer_bytes
from tk.infer.engine.kv_formats import KV_DTYPES, CacheShape
from tk.infer.engine.program.lower import Program, lower
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.tests.model.architectures import ENTRIES


def program(folder: Path) -> Program:
    ENTRIES["qwen3"].make(folder)  # heads of 24
    return lower(decoder_spec(stored_config(Checkpoint.open(folder))))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cache_takes_what_the_plan_counts(tmp_path: Path, kv_dtype: str) -> None:
    made = program(tmp_path)
    cache = KVCache(made.num_layers, 9, made.num_kv_heads, 32, made.head_dim, kv_dtype, num_twins=4)
    sizes = block_bytes(made, CacheShape(9, 32, kv_dtype, num_twins=4))
    assert cache.num_bytes == 10 * sizes.block + 5 * sizes.twin
    assert (sizes.twin > 0) == (kv_dtype in ("int4", "k8v4"))


def test_buffers_grow_with_the_tokens_of_a_step(tmp_path: Path) -> None:
    made, cache = program(tmp_path), CacheShape(0, 32, "fp32")
    row = 4 * sum(made.row_widths.values())
    assert buffer_bytes(made, cache, 512, 1) - buffer_bytes(made, cache, 64, 1) == 448 * row, "logits are of 64 rows"
