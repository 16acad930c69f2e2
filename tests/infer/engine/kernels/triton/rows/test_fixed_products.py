"""Products that do not depend on the number of rows: against fp64, and bit by bit in any company."""

import pytest
import torch

from tk.infer.engine.kernels.aten.prepared_weights import PreparedProduct
from tk.infer.engine.kernels.triton.rows.fixed_products import fixed_product
from tk.tests.infer.engine.kernels.triton.where import DEVICE

pytestmark = pytest.mark.triton
CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROWS, FEATURES, COLUMNS = 40, 36, 200  # neither fills its blocks


def drawn(dtype: torch.dtype, num_slices: int = 1, num_transposed: int = 0) -> tuple[PreparedProduct, torch.Tensor]:
    """Returns a product, and the weight that it has, [N, K]."""
    torch.manual_seed(0)
    weight_NK = torch.randn(FEATURES, COLUMNS, device=DEVICE).to(dtype)
    stored = weight_NK
    if num_transposed:
        stored = torch.cat([block.t() for block in weight_NK.chunk(num_transposed)])
    slices = stored.chunk(num_slices, dim=0 if num_transposed else -1)
    bias_N = torch.randn(FEATURES, device=DEVICE).to(dtype) if num_slices == 1 else None
    return PreparedProduct(slices, num_transposed, bias_N), weight_NK


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("num_slices", "num_transposed"), [(1, 0), (4, 0), (1, 3), (2, 1)])
def test_products_are_those_of_fp64(dtype: torch.dtype, num_slices: int, num_transposed: int) -> None:
    product, weight_NK = drawn(dtype, num_slices, num_transposed)
    x_MK = torch.randn(ROWS, COLUMNS, device=DEVICE).to(dtype)
    bias_N = 0.0 if product.bias is None else product.bias.double()
    expected = x_MK.double() @ weight_NK.double().t() + bias_N
    found = fixed_product(x_MK, product)
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max() / expected.abs().max()) <= CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
def test_what_is_rounded_afterwards_has_the_same_bits(dtype: torch.dtype) -> None:
    product, _ = drawn(dtype, num_transposed=3)
    x_MK = torch.randn(ROWS, COLUMNS, device=DEVICE).to(dtype)
    wide = fixed_product(x_MK, product, rounds=False)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), fixed_product(x_MK, product))


def test_the_product_of_a_router_is_not_rounded_to_the_dtype_of_rows() -> None:
    product, weight_NK = drawn(torch.float32)
    x_MK = torch.randn(3, COLUMNS, device=DEVICE).bfloat16()
    expected = torch.nn.functional.linear(x_MK.double(), weight_NK.double(), product.bias.double())  # type: ignore[union-attr]
    found = fixed_product(x_MK, product)
    assert found.dtype == torch.float32
    assert float((found.double() - expected).abs().max() / expected.abs().max()) <= 1e-6


def test_rows_have_the_same_bits_in_any_company() -> None:
    product, _ = drawn(torch.float32, num_slices=2)
    x_MK = torch.randn(64, COLUMNS, device=DEVICE)
    whole = fixed_product(x_MK, product)
    for first, count in ((0, 1), (63, 1), (5, 2), (1, 3), (30, 8), (7, 16), (9, 17)):
        assert torch.equal(fixed_product(x_MK[first : first + count], product), whole[first : first + count])
