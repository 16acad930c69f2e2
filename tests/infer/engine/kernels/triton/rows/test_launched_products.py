"""Products with weights in codes and with those of experts, against the widened weights of the ATen backend."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from tk.core.quantization import Grouping
from tk.infer.engine.kernels.triton.launches import TritonKernels
from tk.infer.engine.kernels.triton.rows import launched_products, low_rank
from tk.infer.engine.kernels.triton.rows.launched_products import multiply_rows, multiply_tiles, tile_rows
from tk.infer.engine.kernels.triton.step.device_tables import ExpertPairs
from tk.infer.engine.kernels.triton.step.step_adapters import LINE, pair_tiles
from tk.parallel import products
from tk.parallel.coded_weight import CodedWeight
from tk.parallel.row_groups import RowGroups
from tk.tests.infer.engine.kernels.triton.where import CLOSE, DEVICE, ON_GPU

pytestmark = pytest.mark.triton
EXPERTS, FEATURES = 6, 20
GROUPINGS = {
    "dense": (None, 100),
    "int8": (Grouping(8, 128), 256),
    "int8 of 96": (Grouping(8, 96), 96),
    "int4": (Grouping(4, 32), 96),
    "int4 of 17": (Grouping(4, 17), 34),
    "int4 of 8": (Grouping(4, 8), 64),
}
CHOSEN = (0, 0, 1, 3, 3, 3, 5)


def chosen_pairs() -> ExpertPairs:
    """Returns a pair of each row with its expert."""
    experts = torch.tensor(CHOSEN, dtype=torch.int32, device=DEVICE)
    return ExpertPairs(experts, torch.searchsorted(experts, torch.arange(EXPERTS, device=DEVICE), right=True).int())


def drawn(name: str, dtype: torch.dtype) -> tuple[torch.Tensor | CodedWeight, torch.Tensor, torch.Tensor]:
    """Returns a weight of all experts, the same widened to fp32, and 7 rows."""
    grouping, columns = GROUPINGS[name]
    torch.manual_seed(0)
    values = torch.randn(EXPERTS * FEATURES, columns, device=DEVICE)
    x_MK = torch.randn(len(CHOSEN), columns, device=DEVICE).to(dtype)
    if grouping is None:
        return values.to(dtype), values.to(dtype).float(), x_MK
    weight = CodedWeight.of(values.cpu().numpy(), grouping, dtype, DEVICE)
    return weight, weight[:].float(), x_MK


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares with fp32, relative to the largest value."""
    assert found.isfinite().all()
    assert float((found.float() - expected).abs().max()) <= CLOSE[found.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("multiply", [multiply_rows, multiply_tiles])
def test_products_are_those_of_the_widened_weight(name: str, dtype: torch.dtype, multiply: object) -> None:
    weight, wide_NK, x_MK = drawn(name, dtype)
    bias_N = torch.randn(len(wide_NK), device=DEVICE).to(dtype)
    assert callable(multiply)
    check(multiply(x_MK, weight, bias_N), x_MK.float() @ wide_NK.t() + bias_N.float())
    expected = [x_MK[i].float() @ wide_NK.view(EXPERTS, FEATURES, -1)[e].t() for i, e in enumerate(CHOSEN)]
    found = multiply(x_MK, weight, pairs=chosen_pairs(), rounds=False)
    assert found.dtype == torch.float32
    check(found.to(dtype), torch.stack(expected))


@pytest.mark.parametrize("features", [3, 8])
def test_no_length_of_an_experts_rows_is_read(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's grouped product does not take a weight, of few columns or out features, it would read them."""
    monkeypatch.setattr(products, "_WITHOUT_KERNELS", frozenset())
    monkeypatch.setattr(RowGroups, "counts", property(lambda groups: pytest.fail("the host waits")))
    experts = torch.arange(3, device=DEVICE).repeat_interleave(8).int()
    pairs = ExpertPairs(experts, torch.tensor([8, 16, 24], dtype=torch.int32, device=DEVICE))
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    x_PD, weight = (torch.randn(rows, 8, device=DEVICE).to(dtype) for rows in (24, 3 * features))
    found = TritonKernels.expert_product(Mock(), x_PD, weight, pairs)
    wide_EFD = weight.float().view(3, features, 8)
    expected = torch.stack([wide_EFD[e] @ x.float() for x, e in zip(x_PD, experts.tolist(), strict=True)])
    assert float((found.float() - expected).abs().max()) <= 8e-3 * float(expected.abs().max())


@pytest.mark.parametrize("name", GROUPINGS)
def test_a_gated_product_is_silu_of_gate_times_up(name: str) -> None:
    weight, wide_NK, x_MK = drawn(name, torch.float32)
    gate, up = (x_MK @ wide_NK.t()).chunk(2, dim=-1)
    check(multiply_rows(x_MK, weight, is_gated=True), torch.nn.functional.silu(gate) * up)


def test_a_row_of_a_tile_has_the_same_bits_in_any_company() -> None:
    weight, _, x_MK = drawn("int8", torch.float32)
    together = multiply_tiles(x_MK, weight, size=16)
    for row in range(len(x_MK)):
        assert torch.equal(multiply_tiles(x_MK[row : row + 1], weight, size=16)[0], together[row])


class Grids:
    """In place of a kernel: notes the grids of its launches."""

    def __init__(self) -> None:
        self.found: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.found.append(grid)
        return lambda *arguments, **options: None


def test_tiles_are_in_the_dimension_of_a_grid_that_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has at most 65,535 programs in the others; pairs are those of 131,072 tokens and 16 experts of each."""
    pairs, grids = 2**21, Grids()
    monkeypatch.setattr(launched_products, "tile_product_kernel", grids)
    monkeypatch.setattr(low_rank, "shrink_kernel", grids)
    monkeypatch.setattr(low_rank, "expand_kernel", grids)
    keys = torch.zeros(pairs, dtype=torch.int64, device=DEVICE)
    x_PD, ends = torch.zeros(pairs, 1, device=DEVICE), torch.full((1,), pairs, dtype=torch.int32, device=DEVICE)
    sums = multiply_tiles(x_PD, torch.zeros(1, 1, device=DEVICE), pairs=ExpertPairs(keys.int(), ends), size=16)
    low_rank.add_adapters(x_PD, sums, torch.zeros(2, LINE, dtype=torch.int64, device=DEVICE), 16, pair_tiles(keys, 2))
    assert len(grids.found) == 3
    assert all(grid[0] > 2**16 and max((1, *grid[1:])) < 2**16 for grid in grids.found)


def test_a_tile_suits_the_share_of_an_expert() -> None:
    assert [tile_rows(rows, 4) for rows in (1, 64, 65, 128, 129, 4000)] == [16, 16, 32, 32, 64, 64]
