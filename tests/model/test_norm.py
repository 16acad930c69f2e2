"""The backward of tk's RMSNorm against torch's, also if other operators share its gradient."""

import pytest
import torch
import torch.nn.functional as F

from tk.model.norm import RMSNorm


def _norm(features: int) -> RMSNorm:
    norm = RMSNorm(features, 1e-5, dtype=torch.float64, device=torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, features))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_gradient_that_others_use_too_is_not_overwritten(dtype: torch.dtype, norm_first: bool) -> None:
    norm = _norm(6).to(dtype)
    a, x, w = (torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    grads = []
    for ours in (True, False):
        left, right = a.clone().requires_grad_(), x.clone().requires_grad_()
        normed = norm(left) if ours else F.rms_norm(left, (6,), norm.weight, 1e-5)
        total = normed + right if norm_first else right + normed
        (total * w).sum().backward()
        grads.append((left.grad, right.grad))
    for mine, expected in zip(*grads, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_a_broadcast_gradient_is_accepted() -> None:
    norm = _norm(6)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    norm(x).sum().backward()
    mine, weight = x.grad, norm.weight.grad
    other = x.detach().clone().requires_grad_()
    scale = norm.weight.detach().clone().requires_grad_()
    F.rms_norm(other, (6,), scale, 1e-5).sum().backward()
    torch.testing.assert_close(mine, other.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight, scale.grad, rtol=1e-4, atol=1e-6)
