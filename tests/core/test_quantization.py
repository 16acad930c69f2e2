"""The codes of quantized weights against plain numpy."""

import numpy as np
import pytest

from tk.core.casts import Array, cast
from tk.core.dtypes import BF16, FP32
from tk.core.quantization import Grouping, quantize, untransposed


def bf16(values: Array) -> Array:
    return cast(cast(values.astype(np.float32), FP32, BF16), BF16, FP32)


def reference(values: Array, grouping: Grouping) -> tuple[Array, Array, Array]:
    """Returns codes, scales and minima, group by group, by rounding to nearest."""
    codes, scales, minima = [], [], []
    for group in values.reshape(-1, grouping.columns):
        if grouping.bits == 8:
            scale, low = np.abs(group).max() / np.float32(127), np.float32(0)
            code = np.rint(group / (scale or np.float32(1))).clip(-127, 127) + 128
        else:
            low = bf16(group.min()[None])[0]
            scale = bf16((group.max() - group.min())[None] / np.float32(15))[0]
            code = np.rint((group - low) / (scale or np.float32(1))).clip(0, 15)
        codes.append(code)
        scales.append(scale)
        minima.append(low)
    shape = len(values), -1
    return np.array(codes).reshape(values.shape), np.reshape(scales, shape), np.reshape(minima, shape)


@pytest.mark.parametrize(
    ("grouping", "rows", "columns"),
    [(Grouping(8, 128), 700, 256), (Grouping(4, 32), 3, 64), (Grouping(4, 13), 70, 39), (Grouping(8, 20), 1, 40)],
)
def test_codes_scales_and_minima_are_those_of_plain_numpy(grouping: Grouping, rows: int, columns: int) -> None:
    random = np.random.default_rng(columns)
    values = random.standard_normal((rows, columns), np.float32) * 10.0 ** random.integers(-9, 3, (rows, 1))
    values = values.astype(np.float32)
    values[0, : grouping.columns] = 0
    found = quantize(values, grouping)
    for mine, plain in zip((found.codes, found.scales, found.minima), reference(values, grouping), strict=True):
        assert np.array_equal(mine, plain)
    step = np.repeat(found.scales, grouping.columns, axis=1)
    # Half a step; in 4 bits, minimum and scale are rounded too.
    slack = 0.5 * step if grouping.bits == 8 else 0.6 * step + 2.0**-8 * np.abs(values)
    assert (np.abs(found.widen() - values) <= slack + 1e-30).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_are_not_finite_reach_the_logits(bits: int) -> None:
    values = np.ones((3, 32), np.float32)
    values[0, 3], values[1, 20] = np.nan, np.inf
    wide = quantize(values, Grouping(bits, 16)).widen()
    assert np.isnan(wide[0, :16]).all()
    assert np.isnan(wide[1, 16:]).all()
    np.testing.assert_allclose(np.delete(wide.reshape(6, 16), (0, 3), axis=0), 1, rtol=0.01)


def test_transposed_blocks_become_rows() -> None:
    weight = np.arange(48).reshape(12, 4)
    stored = np.concatenate([block.T for block in np.split(weight, 3)])
    assert np.array_equal(untransposed(stored, 3), weight)
    assert untransposed(weight, 0) is weight


def test_bytes_of_groups_fill_words() -> None:
    assert (Grouping(8, 128).group_bytes, Grouping(4, 32).group_bytes) == (4 + 128, 4 + 16)
    assert (Grouping(8, 18).room, Grouping(4, 26).room, Grouping(4, 26).group_bytes) == (20, 32, 4 + 16)
