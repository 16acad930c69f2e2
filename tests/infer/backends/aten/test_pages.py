"""Rounding: to the nearest fp8, and to int8 within half a step of each vector."""

import numpy as np
import torch

from tk.core.casts import widen
from tk.core.dtypes import FP8_E4M3
from tk.infer.backends.aten.pages import quantize, round_to
from tk.infer.kv_formats import FP8


def test_fp8_is_the_nearest_value_and_saturates() -> None:
    known = widen(np.arange(127, dtype=np.uint8), FP8_E4M3)
    x = torch.cat([torch.linspace(-500, 500, 2001), torch.logspace(-5, 3, 500), torch.tensor([torch.inf])])
    found = round_to(x, FP8).double().numpy()
    error = np.abs(np.abs(found) - np.minimum(np.abs(x.numpy()), 448))
    nearest = np.abs(known[:, None] - np.minimum(np.abs(x.numpy()), 448)).min(axis=0)
    assert np.array_equal(error, nearest)
    assert np.array_equal(np.sign(found)[found != 0], np.sign(x.numpy())[found != 0])
    assert round_to(torch.tensor([torch.nan]), FP8).float().isnan().all()


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
