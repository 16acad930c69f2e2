"""The cache: vectors come back from the blocks that they were stored in, integers rotated and within half a step."""

import pytest
import torch

from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.aten.pages import round_to
from tk.infer.engine.kv_formats import INT8, kv_format

BLOCK, HEADS, DIM = 4, 2, 8


def cache(kv_dtype: str, num_layers: int = 2) -> KVCache:
    """Returns an empty cache of 5 blocks beside the null block."""
    return KVCache(num_layers, 5, HEADS, BLOCK, DIM, kv_dtype)


def store(cache: KVCache, layer: int, slots: list[int], k_THE: torch.Tensor, v_THE: torch.Tensor) -> None:
    begun = [slot // BLOCK for slot in slots if slot % BLOCK == 0]
    places = cache.places(torch.tensor(slots), torch.tensor(begun, dtype=torch.int64))
    cache.append(layer, places, k_THE, v_THE)


def random(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16", "fp8", "int8"])
def test_tokens_come_back_in_the_order_of_their_blocks(kv_dtype: str) -> None:
    filled, k, v = cache(kv_dtype), random(6, 1), random(6, 2)
    store(filled, 1, [12, 13, 14, 15, 4, 5], k, v)  # block 3, then half of block 1
    pages = filled.pages(torch.tensor([[3, 1]]))
    for found, given in zip(filled.read(1, pages, 2), (k, v), strict=True):
        assert found.dtype == torch.float32
        assert found.shape == (HEADS, 2 * BLOCK, DIM)
        format_ = kv_format(kv_dtype).keys
        stored = filled.rotate(given) if format_ == INT8 else round_to(given, format_).float()
        bound = float(stored.abs().amax()) / 254 * 1.001 if format_ == INT8 else 0.0
        torch.testing.assert_close(found[:, :6], stored.transpose(0, 1), rtol=0, atol=bound)
        assert not found[:, 6:].any(), "nothing was stored there"
    assert not filled.read(0, pages, 2)[0].any(), "the other layer is untouched"
    assert not filled.read(1, filled.pages(torch.tensor([[0]])), 1)[0].any(), "the null block stays zero"


def test_a_block_that_begins_again_forgets_its_earlier_owner() -> None:
    filled = cache("int8")
    store(filled, 0, [8, 9, 10, 11], random(4, 1), random(4, 2))
    store(filled, 0, [8], random(1, 3), random(1, 4))
    keys, values = filled.read(0, filled.pages(torch.tensor([[2]])), 1)
    assert keys[:, 0].any()
    assert not keys[:, 1:].any()
    assert not values[:, 1:].any()
    store(filled, 0, [9], random(1, 5), random(1, 6))
    assert filled.read(0, filled.pages(torch.tensor([[2]])), 1)[0][:, 0].equal(keys[:, 0]), "token 8 was not touched"


@pytest.mark.parametrize(("kv_dtype", "size"), [("fp32", 4 * DIM), ("bf16", 2 * DIM), ("fp8", DIM), ("int8", DIM + 4)])
def test_bytes_are_those_of_all_vectors(kv_dtype: str, size: int) -> None:
    assert cache(kv_dtype, num_layers=3).num_bytes == 2 * 3 * (5 + 1) * HEADS * BLOCK * size
