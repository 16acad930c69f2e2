"""The gradient norm of large tensors, against fp64: it decides on clipping."""

import pytest
import torch
from torch import nn

from tk.train import initialize
from tk.train.zero.square_sum import ROW, square_sum


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, 2 * ROW + 5])
def test_every_element_counts_once(size: int) -> None:
    values = torch.arange(1.0, size + 1) / ROW
    assert float(square_sum(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-7)


def test_what_is_not_finite_shows() -> None:
    values = torch.ones(ROW + 1)
    values[7] = torch.inf
    assert float(square_sum(values)) == torch.inf
    values[ROW] = torch.nan
    assert bool(square_sum(values).isnan())


class _Product(nn.Module):
    """A parameter whose gradient is what it is called with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return self.weight @ grad


def test_the_norm_of_a_large_gradient_is_that_of_fp64() -> None:
    """One fp32 norm over 16 Mi elements was 0.065 % short."""
    grad = torch.randn(2**24 + 3, generator=torch.Generator().manual_seed(0))
    engine = initialize(_Product(len(grad)), {"lr": 1e-3})
    engine.backward(engine(grad))
    engine.step()
    assert engine.last_grad_norm == pytest.approx(float(grad.double().norm()), rel=1e-7)
