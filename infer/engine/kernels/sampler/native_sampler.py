"""The sampler in C (sampler.c) over ctypes: the same results as numpy_sampler.py, to the bit."""

import ctypes
from pathlib import Path
from typing import Final

import numpy as np

from .....core.casts import Array
from .....core.native import NativeSource, NativeUnit, load_library
from ...step.sampler_output import SamplerOutput
from ...step.sampling_rows import SamplingRows
from .block import SamplingBatch, SamplingBlock, most_alternatives, scratch_bytes

_FOLDER: Final = Path(__file__).parent
_X86: Final = ("x86_64",)
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")


def _unit(name: str, flags: tuple[str, ...] = (), machines: tuple[str, ...] = ()) -> NativeUnit:
    return NativeUnit(name, _FOLDER / "sampler.c", (f"-DTK_UNIT={name}", *flags), machines)


SOURCE: Final = NativeSource(
    name="sampler",
    units=(_unit("base"), _unit("avx2", ("-mavx2",), _X86), _unit("avx512", _AVX512, _X86)),
    headers=tuple(_FOLDER / name for name in ("exact_math.h", "row.h", "row_best.h", "row_filter.h")),
)


class NativeSampler:
    """The sampler of one unit of the library, with memory of its own: one thread at a time may call it.

    Args:
        unit: the name of the unit.

    Attributes:
        unit: the name of the unit.
        sample_rows: the C function: block, first row, row behind the last, scratch.
    """

    def __init__(self, library: ctypes.CDLL, unit: str) -> None:
        self.unit = unit
        self.sample_rows = getattr(library, f"tk_sample_rows_{unit}")
        self.sample_rows.argtypes = (ctypes.POINTER(SamplingBatch), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        self.sample_rows.restype = None
        self._vocab = 0
        self._scratch = np.empty(0, np.float64)
        self._block = SamplingBlock(0, 0)

    def __call__(self, logits_RV: Array, rows: SamplingRows, masks: Array | None = None) -> SamplerOutput:
        """Samples all rows; see `sampler.run_sampler`."""
        num_rows, vocab = logits_RV.shape
        most = most_alternatives(rows)
        if logits_RV.strides[1] != logits_RV.itemsize:
            logits_RV = np.ascontiguousarray(logits_RV)
        block = self._block_for(num_rows, vocab, most)
        block.fill(rows, masks)
        block.batch.logits = logits_RV.ctypes.data
        block.batch.row_stride = logits_RV.strides[0] // logits_RV.itemsize
        self.sample_rows(block.batch, 0, num_rows, self._scratch.ctypes.data)
        return block.output(num_rows, most, rows.have_candidates)

    def _block_for(self, num_rows: int, vocab: int, most: int) -> SamplingBlock:
        block = self._block
        if vocab != self._vocab or num_rows > block.capacity or most > block.top_width:
            capacity, width = max(num_rows, block.capacity), max(most, block.top_width)
            self._block, self._vocab = SamplingBlock(capacity, vocab, width), vocab
            self._scratch = np.empty(scratch_bytes(vocab) // 8, np.float64)
        return self._block


def native_sampler() -> NativeSampler | None:
    """Loads the library, or builds it; returns its sampler for this CPU, or None if there can be none here."""
    loaded = load_library(SOURCE)
    return None if loaded is None else NativeSampler(loaded.library, loaded.best_unit)
