"""Low-precision gradients to which many tokens contribute, on a CPU, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from tk.parallel.wide_sums import embedding, layer_norm

TOKENS = 3000


def _positive(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def _tolerance(dtype: torch.dtype) -> float:
    return max(2 * torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_token_that_occurs_often_has_its_whole_gradient(dtype: torch.dtype) -> None:
    """A sum in bf16 would stop growing after 256 occurrences."""
    ids = torch.arange(TOKENS).view(3, -1) % 2 * 4
    grad = (_positive(3, TOKENS // 3, 8, seed=0) / 64).to(dtype)
    weight = torch.zeros(6, 8, dtype=dtype, requires_grad=True)
    embedding(ids, weight).backward(grad)
    expected = torch.zeros(6, 8, dtype=torch.float64).index_add_(0, ids.flatten(), grad.flatten(0, 1).double())
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    torch.testing.assert_close(weight.grad.double(), expected, rtol=_tolerance(dtype), atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_norm_adds_up_over_all_tokens(dtype: torch.dtype) -> None:
    x, grad = (_positive(3, TOKENS // 3, 8, seed=seed).to(dtype) for seed in range(2))
    grad = grad / 64
    weight, bias = torch.linspace(0.5, 2, 8).to(dtype), torch.linspace(-1, 1, 8).to(dtype)
    mine, wide = (
        [each.to(kind, copy=True).requires_grad_() for each in (x, weight, bias)] for kind in (dtype, torch.float64)
    )
    y = layer_norm(mine[0], mine[1], mine[2], 1e-5)
    assert torch.equal(y, F.layer_norm(x, (8,), weight, bias, 1e-5)), "forward is torch's"
    y.backward(grad)
    F.layer_norm(wide[0], (8,), wide[1], wide[2], 1e-5).backward(grad.double())
    tolerance = _tolerance(dtype)
    for tensor, expected in zip(mine, wide, strict=True):
        assert tensor.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(
            tensor.grad.double(), expected.grad, rtol=tolerance, atol=tolerance * float(expected.grad.abs().max())
        )
