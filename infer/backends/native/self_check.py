"""A check of kernels before they serve: a compiler, an emulator or a CPU may get instructions wrong."""

from ctypes import byref
from typing import Final

import numpy as np

from ....core.casts import cast, widen
from ....core.dtypes import COMPUTE_DTYPES, FP32
from .library import Kernels
from .memory import floats
from .packing import Stack, pack
from .structures import MOST_ROWS, PANEL

_INPUTS: Final = 48
_OUTPUTS: Final = 5 * PANEL


def products_are_right(kernels: Kernels) -> bool:
    """Returns whether products in every format and for every number of rows of a tile are those of numpy."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((_OUTPUTS, _INPUTS), np.float32)
    x = floats(MOST_ROWS + 1, _INPUTS + PANEL)
    x[:, :_INPUTS] = random.standard_normal((len(x), _INPUTS), np.float32)
    for dtype in COMPUTE_DTYPES:
        stored = cast(weight, FP32, dtype)
        packed, memory = pack(kernels, Stack(1, _INPUTS, _OUTPUTS), stored, dtype)
        expected = x[:, :_INPUTS].astype(np.float64) @ widen(stored, dtype).T
        for rows in range(1, len(x) + 1):
            out = floats(rows, _OUTPUTS)
            kernels.multiply(byref(packed), x.ctypes.data, x.shape[1], rows, out.ctypes.data, _OUTPUTS)
            if not np.allclose(out, expected[:rows], rtol=1e-4, atol=1e-4):
                return False
        del memory  # the packed weight points to it until here
    return True
