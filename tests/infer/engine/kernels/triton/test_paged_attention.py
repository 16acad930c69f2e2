"""The tiles of queries, and the sizes of tiles and splits that launches choose."""

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.triton.paged_attention import LaunchedAttention, query_tiles
from tk.infer.engine.kernels.triton.tilings import MOST_SPLITS, prefill_tiling, split_keys, width_of
from tk.tests.infer.engine.kernels.triton.one_step import Layer

pytestmark = pytest.mark.triton


def test_tiles_cover_each_token_once() -> None:
    lengths = np.array([5, 1, 0, 8, 9])
    tiles = query_tiles(lengths, 4)
    assert tiles.dtype == np.int32
    covered = [(span, at) for span, first in tiles for at in range(first, min(first + 4, lengths[span]))]
    assert sorted(covered) == [(span, at) for span, length in enumerate(lengths) for at in range(length)]


def test_splits_are_few_and_whole_tiles() -> None:
    for context in (1, 256, 257, 8192, 8193, 131072, 1_000_001):
        keys = split_keys(context)
        assert keys % 256 == 0
        assert -(-context // keys) <= MOST_SPLITS
    assert split_keys(8192) == 256


def test_columns_of_a_head() -> None:
    assert [width_of(dim) for dim in (8, 32, 33, 80, 128, 129, 256)] == [32, 32, 64, 128, 128, 256, 256]


def test_a_tile_has_fewer_rows_where_wide_heads_of_4_bits_have_small_blocks() -> None:
    rows = {(dim, block): prefill_tiling(dim, 8, 2, True, block).rows for dim in (128, 256) for block in (16, 32)}
    assert rows == {(128, 16): 32, (128, 32): 32, (256, 16): 16, (256, 32): 32}


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (20, 1), (71, 1), (12, 4)])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int4"])
def test_a_tile_has_a_whole_token(heads: int, kv_heads: int, kv_dtype: str) -> None:
    cache = Layer(heads, kv_heads, 64, kv_dtype).cache()
    attention = LaunchedAttention(cache, heads, torch.float32, 1000)
    assert attention.tokens >= 1
    assert attention.num_splits == 4
    assert attention.scratch(3).sums.shape == (3, 4, heads, 64)
