"""A check of kernels before they serve: a compiler, an emulator or a CPU may get instructions wrong."""

from ctypes import byref
from itertools import product
from typing import Final

import numpy as np

from .....core.casts import Array, cast, widen
from .....core.dtypes import BF16, COMPUTE_DTYPES, FP32, DType
from .....core.quantization import Grouping, quantize
from .binding.library import Kernels
from .binding.memory import floats
from .binding.structures import MOST_ROWS, PANEL, PackedMatrix
from .packing import Stack, pack

_INPUTS: Final = 48
_OUTPUTS: Final = 5 * PANEL
_GROUPINGS: Final = (Grouping(8, 24), Grouping(4, 12))
_ROWS: Final[tuple[int, ...]] = (*range(1, MOST_ROWS + 2), 40)


def why_not(kernels: Kernels) -> str:
    """Returns the reason why kernels must not serve on this machine; "" if there is none.

    Products in every format and for every number of rows of a tile are compared with numpy's, instructions for bf16
    also with a model of them, bit for bit.
    """
    if reason := kernels.refusal():
        return reason.decode()
    random = np.random.default_rng(0)
    weight = random.standard_normal((_OUTPUTS, _INPUTS), np.float32)
    x = floats(max(_ROWS), _INPUTS + PANEL)
    x[:, :_INPUTS] = random.standard_normal((len(x), _INPUTS), np.float32)
    for dtype in COMPUTE_DTYPES:
        stored = cast(weight, FP32, dtype)
        expected = seen(kernels, x[:, :_INPUTS], dtype).astype(np.float64) @ widen(stored, dtype).T
        made = pack(kernels, Stack(1, _INPUTS, _OUTPUTS), stored, dtype)
        if rows := _wrong_rows(kernels, made, x, expected):
            return f"their {dtype.name} products of {rows} rows are wrong"
    for grouping, dtype in product(_GROUPINGS, (FP32, BF16)):
        expected = seen(kernels, x[:, :_INPUTS], dtype).astype(np.float64) @ quantize(weight, grouping).widen().T
        made = pack(kernels, Stack(1, _INPUTS, _OUTPUTS, grouping=grouping), weight, dtype)
        if rows := _wrong_rows(kernels, made, x, expected):
            return f"their {dtype.name} products of {rows} rows with weights of {grouping.bits} bits are wrong"
    return ""


def _wrong_rows(kernels: Kernels, made: tuple[PackedMatrix, Array], x: Array, expected: Array) -> int:
    """Returns a number of rows whose product with a packed weight is wrong; 0 if there is none.

    Args:
        kernels: the native functions.
        made: the packed weight, and its memory, which lives until the end.
        x: the rows.
        expected: their products.
    """
    for rows in _ROWS:
        out = floats(rows, _OUTPUTS)
        kernels.multiply(byref(made[0]), x.ctypes.data, x.shape[1], rows, out.ctypes.data, _OUTPUTS)
        if not np.allclose(out, expected[:rows], rtol=1e-4, atol=1e-4):
            return rows
    return 0


def seen(kernels: Kernels, x: Array, dtype: DType) -> Array:
    """Returns rows as a product takes them in a model's dtype: fp32, rounded to bf16 by instructions for bf16."""
    return widen(cast(x, FP32, BF16), BF16) if kernels.column_step and dtype == BF16 else x
