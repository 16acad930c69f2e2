"""Kernels of one tile against torch's attention and against sums over all keys."""

import pytest
import torch
import torch.nn.functional as F

from tk.train.context.dealing import deal
from tk.train.context.kernels import (
    CpuTileKernel,
    FlashTileKernel,
    PortableTileKernel,
    TileKernel,
    _queries_at_once,
    kernel_for,
)
from tk.train.context.tiled import attend_tiles, differentiate_tiles
from tk.train.context.tiles import tiles

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


def test_the_portable_kernel_takes_fewer_queries_of_longer_rows() -> None:
    for heads, keys, expected in ((32, 1024, 256), (32, 32768, 16), (16, 10**8, 1)):
        q, k = torch.empty(1, heads, 4096, 64, device="meta"), torch.empty(1, heads, keys, 64, device="meta")
        assert _queries_at_once(q, k) == expected


def test_every_device_has_a_kernel() -> None:
    assert isinstance(kernel_for(torch.empty(3, 2, 8)), CpuTileKernel)
    assert isinstance(kernel_for(torch.empty(3, 2, 8, device="meta")), PortableTileKernel)


@pytest.mark.gpu
def test_a_gpu_has_flash_attention_in_16_bits() -> None:
    for dtype, head_dim, expected in (
        (torch.bfloat16, 128, FlashTileKernel),
        (torch.float16, 24, FlashTileKernel),
        (torch.float32, 128, PortableTileKernel),
        (torch.bfloat16, 12, PortableTileKernel),
        (torch.bfloat16, 320, PortableTileKernel),
    ):
        assert isinstance(kernel_for(torch.empty(3, 2, head_dim, dtype=dtype, device="cuda")), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_tiles_on_a_gpu_are_attention_over_all_keys(dtype: torch.dtype, window: int | None) -> None:
    """Two documents, the second of an odd length, a rank of two with tiles of every shape, against fp64 on the CPU."""
    lengths = (700, 1348)
    dealing = deal(1, 2048, lengths, [window], 2)
    generator = torch.Generator().manual_seed(1)
    positions = torch.from_numpy(dealing.positions(0).reshape(-1))
    rounded = [torch.randn(2048, heads, 64, generator=generator).to(dtype) for heads in (6, 2, 2, 6)]
    true_q, true_k, true_v = (each.double().requires_grad_() for each in rounded[:3])
    documents = torch.repeat_interleave(torch.tensor(lengths))
    distance = torch.arange(2048)[:, None] - torch.arange(2048)
    mask = (documents[:, None] == documents) & (distance >= 0) & (distance < (window or 4096))
    q, k, v = (each.transpose(0, 1)[None] for each in (true_q, true_k, true_v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)[positions]
    grad = rounded[3][positions]
    expected = torch.autograd.grad(out, (true_q, true_k, true_v), grad.double())
    q, k, v = (each.to("cuda").requires_grad_() for each in (rounded[0][positions], rounded[1], rounded[2]))
    kernel, found = kernel_for(q), tiles(dealing, 0, window)
    mine, lse = attend_tiles((q, k, v), found, kernel, None)
    gradients = differentiate_tiles((q, k, v), (grad.to("cuda"), mine, lse), found, kernel, None)
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}[dtype]
    wanted = (out, expected[0][positions], *expected[1:])
    for name, got, want in zip(("out", "dq", "dk", "dv"), (mine, *gradients), wanted, strict=True):
        difference = (got.detach().cpu().double() - want.detach()).norm() / want.detach().norm()
        assert difference < bound, (name, difference.item())
