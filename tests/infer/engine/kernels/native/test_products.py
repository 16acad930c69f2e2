"""Packed products: right in every format, and the same bits for any number of rows."""

import numpy as np
import pytest

from tk.core.casts import cast, widen
from tk.core.dtypes import BF16, FP16, FP32, DType
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels
from tk.infer.engine.kernels.native.packing import Stack
from tk.infer.engine.kernels.native.self_check import seen
from tk.tests.infer.engine.kernels.native.products import ROWS, multiply

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("inputs", "outputs", "slices"), [(64, 96, 1), (37, 21, 1), (96, 50, 8), (60, 33, 4)])
def test_products_are_right_and_rows_independent(
    instruction_set: str, dtype: DType, inputs: int, outputs: int, slices: int
) -> None:
    kernels = load_kernels(instruction_set)
    assert kernels is not None
    random = np.random.default_rng(inputs)
    weight = random.standard_normal((outputs, inputs), np.float32)
    x = random.standard_normal((512, inputs), np.float32)
    stack = Stack(1, inputs, outputs, slices=slices)
    whole = multiply(kernels, stack, weight, dtype, x)
    expected = seen(kernels, x, dtype).astype(np.float64) @ widen(cast(weight, FP32, dtype), dtype).T
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-4)
    for rows in ROWS:
        assert np.array_equal(multiply(kernels, stack, weight, dtype, x[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_transposed_weight_is_the_same_weight(instruction_set: str) -> None:
    kernels = load_kernels(instruction_set)
    assert kernels is not None
    random = np.random.default_rng(1)
    weight = random.standard_normal((48, 32), np.float32)
    x = random.standard_normal((5, 32), np.float32)
    stored = np.concatenate([block.T for block in np.split(weight, 3)])  # three blocks [in, out / 3]
    transposed = multiply(kernels, Stack(1, 32, 48, num_transposed=3), stored, FP32, x)
    assert np.array_equal(transposed, multiply(kernels, Stack(1, 32, 48), weight, FP32, x))


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_slices_of_one_rank_are_the_tree_of_the_slices_of_two(instruction_set: str) -> None:
    kernels = load_kernels(instruction_set)
    assert kernels is not None
    random = np.random.default_rng(2)
    weight = random.standard_normal((32, 64), np.float32)
    x = random.standard_normal((7, 64), np.float32)
    whole = multiply(kernels, Stack(1, 64, 32, slices=8), weight, FP32, x)
    halves = [
        multiply(kernels, Stack(1, 32, 32, slices=4), weight[:, part], FP32, x[:, part])
        for part in (slice(32), slice(32, 64))
    ]
    assert np.array_equal(whole, halves[0] + halves[1])
