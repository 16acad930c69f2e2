"""Products of groups of rows against one linear layer per group: outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F

from tk.parallel import products
from tk.parallel.grouped_products import grouped_linear
from tk.parallel.row_groups import RowGroups

SIZES = [(64, 96), (33, 17)]  # rows of 16 bytes' multiples, which torch's product of all groups takes, and others
COUNTS = [(5, 0, 30, 0, 1), (0, 0, 40, 0, 0), (0, 0, 0, 0, 0)]


def draw(num_rows: int, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows [P, D], weights [5, F, D] and the gradient [P, F] of outputs."""
    (features, outputs), generator = sizes, torch.Generator().manual_seed(0)
    shapes = ((num_rows, features), (5, outputs, features), (num_rows, outputs))
    x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, grad


def trained(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy that gets a gradient."""
    return values.to(dtype, copy=True).requires_grad_()


def gradient(values: torch.Tensor) -> torch.Tensor:
    assert values.grad is not None
    return values.grad


def one_by_one(x_PD: torch.Tensor, weight_EFD: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Returns the products of a linear layer per group, [P, F]."""
    layers = zip(x_PD.split(counts), weight_EFD, strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in layers])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_has_the_bits_of_a_linear_layer(
    dtype: torch.dtype, sizes: tuple[int, int], counts: tuple[int, ...]
) -> None:
    values, drawn_weight, grad = draw(sum(counts), sizes, dtype)
    (x, weight), (other_x, other_weight) = ((trained(values, dtype), trained(drawn_weight, dtype)) for _ in range(2))
    y, expected = grouped_linear(x, weight, RowGroups.of(counts, x.device)), one_by_one(other_x, other_weight, counts)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(y, expected)
    assert torch.equal(gradient(x), gradient(other_x))
    assert torch.equal(gradient(weight), gradient(other_weight))
    assert bool(gradient(weight).any()) == (sum(counts) > 0)


def test_a_cpu_without_kernels_multiplies_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_WITHOUT_KERNELS", frozenset([torch.bfloat16]))
    values, drawn_weight, grad = draw(36, SIZES[0], torch.bfloat16)
    (x, weight), (wide_x, wide_weight) = (
        (trained(values, dtype), trained(drawn_weight, dtype)) for dtype in (torch.bfloat16, torch.double)
    )
    y, expected = (
        grouped_linear(x, weight, RowGroups.of(COUNTS[0], x.device)),
        one_by_one(wide_x, wide_weight, COUNTS[0]),
    )
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected), (gradient(x), gradient(wide_x)), (gradient(weight), gradient(wide_weight))]
    for low, exact in pairs:
        torch.testing.assert_close(low.double(), exact, rtol=0.51 * torch.finfo(low.dtype).eps, atol=1e-4)


def test_gradients_that_are_not_wanted_are_not_computed() -> None:
    x, weight, _ = draw(36, SIZES[0], torch.float32)
    grouped_linear(x, weight.requires_grad_(), RowGroups.of(COUNTS[0], x.device)).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
