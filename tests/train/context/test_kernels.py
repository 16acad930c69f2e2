"""Kernels of one tile against torch's attention and against sums over all keys."""

import pytest
import torch
import torch.nn.functional as F

from tk.train.context.kernels import CpuTileKernel, PortableTileKernel, TileKernel, kernel_for

KERNELS: tuple[TileKernel, ...] = (CpuTileKernel(), PortableTileKernel())


@pytest.mark.parametrize("kernel", KERNELS, ids=["cpu", "portable"])
@pytest.mark.parametrize(("causal", "num_keys", "scale"), [(True, 300, None), (False, 70, None), (False, 300, 0.2)])
def test_a_kernel_is_torchs_attention(kernel: TileKernel, causal: bool, num_keys: int, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 300, 6, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
    k, v = (
        torch.randn(1, num_keys, 2, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for _ in range(2)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=scale)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    scores = (q @ k.repeat_interleave(3, 1).mT) * (8**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf)
    inputs = (q.detach().float(), k.detach().float(), v.detach().float())
    out, lse = kernel.forward(*inputs, causal, scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-6)
    for mine, true in zip(kernel.backward(inputs, grad.float(), out, lse, causal, scale), gradients, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=2e-6)


def test_every_device_has_a_kernel() -> None:
    assert isinstance(kernel_for(torch.device("cpu")), CpuTileKernel)
    assert isinstance(kernel_for(torch.device("meta")), PortableTileKernel)
