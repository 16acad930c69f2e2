"""Products of low-rank adapters against those in fp64, of rows with several adapters, and of pairs with experts."""

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.triton.rows.low_rank import add_adapters
from tk.infer.engine.kernels.triton.step.step_adapters import LINE, RowTiles, StepAdapters, pair_tiles
from tk.tests.infer.engine.kernels.triton.where import DEVICE

pytestmark = pytest.mark.triton
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HIDDEN, FEATURES, RANKS, EXPERTS = 100, 90, 48, 3
PAIRS = ((0, 40, 0, 5, 0.5), (50, 40, 5, 20, -2.0))  # first output, outputs, first row of A, rank, scale


class Adapter:
    """Random factors of all experts, and a change of a bias."""

    def __init__(self, dtype: torch.dtype, seed: int, num_experts: int = 1) -> None:
        torch.manual_seed(seed)
        self.down = torch.randn(num_experts, 25, HIDDEN, device=DEVICE).to(dtype) / 8
        self.ups = [torch.randn(num_experts, rows, rank, device=DEVICE).to(dtype) for _, rows, _, rank, _ in PAIRS]
        self.change = torch.randn(FEATURES, device=DEVICE)

    def line(self) -> list[int]:
        """Returns the line of the table."""
        line = [self.change.data_ptr(), self.down.data_ptr(), 25]
        for up, (first, rows, first_rank, rank, scale) in zip(self.ups, PAIRS, strict=True):
            line += [up.data_ptr(), first, rows, first_rank, rank, int(np.float32(scale).view(np.int32))]
        return line + [0] * (LINE - len(line))

    def added(self, x_D: torch.Tensor, expert: int = 0) -> torch.Tensor:
        """Returns what it adds to the sums of a row, fp64."""
        u_R = (self.down[expert].double() @ x_D.double()).to(x_D.dtype).double()
        found = self.change.double()
        for up, (first, rows, first_rank, rank, scale) in zip(self.ups, PAIRS, strict=True):
            found[first : first + rows] += scale * (up[expert].double() @ u_R[first_rank : first_rank + rank])
        return found


def drawn(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows, and sums to which products are added."""
    x_TD, sums_TF = torch.randn(num_rows, HIDDEN, device=DEVICE), torch.randn(num_rows, FEATURES, device=DEVICE)
    return x_TD.to(dtype), sums_TF


def table_of(*adapters: Adapter) -> torch.Tensor:
    """Returns the lines of a weight."""
    return torch.tensor([[0] * LINE, *(each.line() for each in adapters)], device=DEVICE)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares with fp64, relative to the largest value."""
    assert found.isfinite().all()
    assert float((found.double() - expected).abs().max()) <= LIMITS[found.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", LIMITS)
def test_each_row_gets_the_products_of_its_adapter(dtype: torch.dtype) -> None:
    """Alone as in a step of single tokens, and in tiles as in a prompt; rows without an adapter are only rounded."""
    numbers = [0, 1, 1, 2, 0, 2, *[1] * 20]
    adapters = [Adapter(dtype, 1), Adapter(dtype, 2)]
    x_TD, sums_TF = drawn(len(numbers), dtype)
    expected = torch.stack(
        [
            sums.double() + (adapters[n - 1].added(x) if n else 0)
            for x, sums, n in zip(x_TD, sums_TF, numbers, strict=True)
        ]
    )
    runs = [[0, 0, 1], [1, 1, 3], [2, 3, 4], [0, 4, 5], [2, 5, 6], [1, 6, 26], [1, 22, 26], [0, 0, 0]]
    tiles = RowTiles(*torch.tensor(runs, dtype=torch.int32, device=DEVICE).t().contiguous())
    each = StepAdapters.each(torch.tensor(numbers, dtype=torch.int32, device=DEVICE)).tiles
    for way in (each, tiles):
        found = add_adapters(x_TD, sums_TF, table_of(*adapters), RANKS, way)
        check(found, expected)
        assert torch.equal(found[0], sums_TF[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pairs_get_the_factors_of_their_experts(dtype: torch.dtype) -> None:
    adapters = [Adapter(dtype, 1, EXPERTS), Adapter(dtype, 2, EXPERTS)]
    keys = torch.tensor([0, 1, 1, 2, 4, 4, *[7] * 18, 8], device=DEVICE)  # expert * 3 + number
    x_PD, sums_PF = drawn(len(keys), dtype)
    found = add_adapters(x_PD, sums_PF, table_of(*adapters), RANKS, pair_tiles(keys, 3 * EXPERTS))
    expected = [
        sums.double() + (adapters[key % 3 - 1].added(x, key // 3) if key % 3 else 0)
        for x, sums, key in zip(x_PD, sums_PF, keys.tolist(), strict=True)
    ]
    check(found, torch.stack(expected))
