"""Rounding: to the nearest fp8, and to int8 within half a step of each vector."""

import numpy as np
import torch

from tk.core.casts import widen
from tk.core.dtypes import FP8_E4M3
from tk.infer.engine.kernels.aten.pages import quantize, quantize_to_4_bits, round_to
from tk.infer.engine.kv_formats import FP8


def test_fp8_is_the_nearest_value_and_saturates() -> None:
    known = widen(np.arange(127, dtype=np.uint8), FP8_E4M3)
    x = torch.cat([torch.linspace(-500, 500, 2001), torch.logspace(-5, 3, 500), torch.tensor([torch.inf])])
    found = round_to(x, FP8).double().numpy()
    error = np.abs(np.abs(found) - np.minimum(np.abs(x.numpy()), 448))
    nearest = np.abs(known[:, None] - np.minimum(np.abs(x.numpy()), 448)).min(axis=0)
    assert np.array_equal(error, nearest)
    assert np.array_equal(np.sign(found)[found != 0], np.sign(x.numpy())[found != 0])
    assert round_to(torch.tensor([torch.nan]), FP8).float().isnan().all()


def test_4_bits_are_off_by_half_a_step_of_each_group() -> None:
    """A head of 80: groups of 32, 32 and 16, with an outlier in one of them."""
    x = torch.randn(50, 3, 80, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 50)[:, None, None]
    x[:, :, 40] *= 100
    codes, scales, zeros = quantize_to_4_bits(x)
    assert (codes.shape, scales.shape, zeros.shape) == (x.shape, (50, 3, 3), (50, 3, 3))
    assert (int(codes.min()), int(codes.max())) == (0, 15)
    steps, first = (each.float().repeat_interleave(32, dim=-1)[..., :80] for each in (scales, zeros))
    error = (codes * steps + first - x).abs()
    assert (error <= steps * 0.5 + first.abs() * 2.0**-11 + steps * 15 * 2.0**-11).all(), "zeros and scales are fp16"
    lowest, highest = x[..., 32:64].aminmax(dim=-1)
    torch.testing.assert_close(scales[..., 1].float(), (highest - lowest) / 15, rtol=2e-3, atol=0)
    assert quantize_to_4_bits(torch.tensor([1.0, torch.inf]))[2].isnan().all(), "what is not finite is seen later"


def test_int8_is_off_by_half_a_step_of_each_vector() -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None, None]
    x[7] = 0
    values, scales = quantize(x)
    assert (values.dtype, values.shape, scales.shape) == (torch.int8, x.shape, x.shape[:-1])
    assert values.abs().amax() == 127
    error = (values * scales[..., None] - x).abs()
    assert (error <= scales[..., None] * 0.5001).all()
    torch.testing.assert_close(scales[8:], x[8:].abs().amax(-1) / 127)
    assert not values[7].any()
