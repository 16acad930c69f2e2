"""Padding rows to sizes that agree bit for bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tk.infer.engine.kernels.aten.pages import CPU
from tk.infer.engine.kernels.aten.row_tiles import CANDIDATES, SMALLEST, agreeing_sizes, cut
from tk.parallel.mesh import ALONE

sizes = st.sets(st.sampled_from(CANDIDATES[1:])).map(lambda more: tuple(sorted({SMALLEST, *more})))


@given(st.integers(0, 3000), sizes)
def test_tiles_cover_all_rows_in_order_and_are_mostly_full(num_rows: int, allowed: tuple[int, ...]) -> None:
    tiles = cut(num_rows, allowed)
    assert [tile.first for tile in tiles[1:]] == [tile.stop for tile in tiles[:-1]]
    assert (tiles[0].first, tiles[-1].stop) == (0, num_rows) if tiles else num_rows == 0
    for tile in tiles:
        assert tile.size in allowed
        assert 1 <= tile.stop - tile.first <= tile.size
        assert tile.size == SMALLEST or tile.size <= 1.5 * (tile.stop - tile.first)


def test_sizes_that_differ_are_left_out() -> None:
    weight = torch.randn(24, 40)

    def layer(x_ND: torch.Tensor) -> torch.Tensor:
        y_NF = x_ND @ weight.T
        return y_NF + 1e-3 if len(x_ND) in (48, 128) else y_NF

    assert agreeing_sizes([(layer, 40)], torch.float32, CPU, 128, ALONE) == (16, 32, 64, 96)


def test_the_smallest_size_is_always_there() -> None:
    def layer(x_ND: torch.Tensor) -> torch.Tensor:
        return x_ND + len(x_ND)

    assert agreeing_sizes([(layer, 8)], torch.float32, CPU, 512, ALONE) == (SMALLEST,)
    assert agreeing_sizes([(layer, 8)], torch.float32, CPU, 3, ALONE) == (SMALLEST,)
