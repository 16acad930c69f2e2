"""A check of kernels before they serve: a compiler, an emulator or a CPU may get instructions wrong."""

from ctypes import byref
from typing import Final

import numpy as np

from ....core.casts import cast, widen
from ....core.dtypes import BF16, COMPUTE_DTYPES, FP32, DType
from ...scheduling.step_plan import Array
from .library import Kernels
from .memory import floats
from .packing import Stack, pack
from .structures import MOST_ROWS, PANEL

_INPUTS: Final = 48
_OUTPUTS: Final = 5 * PANEL
_ROWS: Final = (*range(1, MOST_ROWS + 2), 40)


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
        packed, memory = pack(kernels, Stack(1, _INPUTS, _OUTPUTS), stored, dtype)
        expected = seen(kernels, x[:, :_INPUTS], dtype).astype(np.float64) @ widen(stored, dtype).T
        for rows in _ROWS:
            out = floats(rows, _OUTPUTS)
            kernels.multiply(byref(packed), x.ctypes.data, x.shape[1], rows, out.ctypes.data, _OUTPUTS)
            if not np.allclose(out, expected[:rows], rtol=1e-4, atol=1e-4):
                return f"their {dtype.name} products of {rows} rows are wrong"
        del memory  # the packed weight points to it until here
    return ""


def seen(kernels: Kernels, x: Array, dtype: DType) -> Array:
    """Returns rows as a product with a weight of a dtype takes them: fp32, rounded to bf16 by instructions for bf16."""
    return widen(cast(x, FP32, BF16), BF16) if kernels.column_step and dtype == BF16 else x
