"""Low-precision products computed in fp32, as on a CPU without kernels for their dtype, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from tk.parallel import products

LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_WITHOUT_KERNELS", frozenset(LOW))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_rounded_once(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 40, 96), (24, 96), (24,))]
    mine = [value.clone().requires_grad_() for value in values]
    wide = [value.double().requires_grad_() for value in values]
    grad = torch.randn(2, 40, 24, generator=generator).to(dtype)
    y = products.linear(mine[0], mine[1], mine[2] if bias else None)
    expected = F.linear(wide[0], wide[1], wide[2] if bias else None)
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected)] + [(m.grad, w.grad) for m, w in zip(mine, wide, strict=True) if w.grad is not None]
    assert len(pairs) == (4 if bias else 3)
    for low, exact in pairs:
        assert low is not None
        assert exact is not None
        assert low.dtype == dtype
        # Half a unit in the last place, and the rounding error of fp32 sums whose terms cancel.
        torch.testing.assert_close(low.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", LOW)
def test_a_wide_product_is_not_rounded_and_its_gradients_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 40, 96), (24, 96))]
    mine = [value.clone().requires_grad_() for value in values]
    wide = [value.double().requires_grad_() for value in values]
    grad = torch.randn(2, 40, 24, generator=generator)
    y, expected = products.wide_linear(*mine), F.linear(*wide)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    y.backward(grad)
    expected.backward(grad.double())
    for low, exact in zip(mine, wide, strict=True):
        assert low.grad is not None
        assert exact.grad is not None
        assert low.grad.dtype == dtype
        torch.testing.assert_close(low.grad.double(), exact.grad, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


def test_fp32_is_torchs_own() -> None:
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    assert torch.equal(products.wide_linear(x, weight), F.linear(x, weight))
    assert torch.equal(products.matmul(x, weight.t()), x @ weight.t())
