"""The sampler in C (sampler.c) over ctypes: the same results as numpy_sampler.py, to the bit."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from ...core.cpu import read_cpu
from ...core.native import NativeSource, NativeUnit, load_library
from ..scheduling.step_plan import Array, SamplerOutput, SamplingRows

_FOLDER: Final = Path(__file__).parent
_X86: Final = ("x86_64",)
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")


def _unit(name: str, flags: tuple[str, ...] = (), machines: tuple[str, ...] = ()) -> NativeUnit:
    return NativeUnit(name, _FOLDER / "sampler.c", (f"-DTK_UNIT={name}", *flags), machines)


SOURCE: Final = NativeSource(
    name="sampler",
    units=(_unit("base"), _unit("avx2", ("-mavx2",), _X86), _unit("avx512", _AVX512, _X86)),
    headers=tuple(_FOLDER / name for name in ("exact_math.h", "row.h", "row_filter.h")),
)

_NUMBERS: Final = ("vocab", "row_stride", "mask_stride", "top_width")
_COLUMNS: Final = (
    *("target", "num_top", "top_k", "sample_index", "new_number"),
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
)
_RESULTS: Final = ("token_ids", "finite", "logprob", "rank", "top_ids", "top_logprobs")
_ENTRIES: Final = ("bias_token", "bias_value", "count_token", "count_value")
_STARTS: Final = ("bias_start", "count_start")


class _Batch(ctypes.Structure):
    """The `sampling_batch` of sampler.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in ("logits", "masks", *_COLUMNS, *_STARTS, *_ENTRIES, *_RESULTS)),
    ]


class NativeSampler:
    """The sampler of one unit of the library, with scratch memory of its own: one thread at a time may call it.

    Args:
        library: the library.
        unit: the name of the unit.
        threads: the number of threads that divide the rows, the caller's among them.
    """

    def __init__(self, library: ctypes.CDLL, unit: str, threads: int = 1) -> None:
        self.unit, self._num_threads = unit, threads
        self._helpers = ThreadPoolExecutor(threads - 1, "tk-sampler") if threads > 1 else None
        self._scratch_bytes = getattr(library, f"tk_sampler_scratch_bytes_{unit}")
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = (ctypes.c_int64,), ctypes.c_int64
        self._sample_rows = getattr(library, f"tk_sample_rows_{unit}")
        self._sample_rows.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        self._sample_rows.restype = None
        self._scratch = np.empty((threads, 0), np.float64)

    def __call__(self, logits_RV: Array, rows: SamplingRows, masks: Array | None, output: SamplerOutput) -> None:
        """Fills `output`, whose arrays are zeros, for all rows; see `sampler.run_sampler`."""
        num_rows, vocab = logits_RV.shape
        if logits_RV.strides[1] != logits_RV.itemsize:
            logits_RV = np.ascontiguousarray(logits_RV)
        arrays = {name: getattr(rows, name) for name in (*_COLUMNS, *_ENTRIES)}
        arrays |= {name: getattr(output, name) for name in _RESULTS}
        edges = np.arange(num_rows + 1)
        arrays["bias_start"] = np.searchsorted(rows.bias_row, edges)
        arrays["count_start"] = np.searchsorted(rows.count_row, edges)
        if masks is not None:
            arrays["masks"] = masks = np.ascontiguousarray(masks)
        batch = _Batch(
            vocab=vocab,
            row_stride=logits_RV.strides[0] // logits_RV.itemsize,
            mask_stride=0 if masks is None else masks.shape[1],
            top_width=output.top_ids.shape[1],
            logits=logits_RV.ctypes.data,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        size = self._scratch_bytes(vocab) // 8 + 1
        if self._scratch.shape[1] < size:
            self._scratch = np.empty((self._num_threads, size), np.float64)
        self._divide(batch, num_rows)

    def _divide(self, batch: _Batch, num_rows: int) -> None:
        parts = min(self._num_threads, num_rows)
        edges = [num_rows * part // max(1, parts) for part in range(parts + 1)]
        calls = [(batch, *edges[i : i + 2], self._scratch[i].ctypes.data) for i in range(parts)]
        others = [self._helpers.submit(self._sample_rows, *call) for call in calls[1:]] if self._helpers else []
        for call in calls[:1]:
            self._sample_rows(*call)
        for other in others:
            other.result()


def native_sampler(threads: int = 1) -> NativeSampler | None:
    """Loads the library, or builds it; returns its sampler for this CPU, or None if there can be none here."""
    loaded = load_library(SOURCE)
    if loaded is None:
        return None
    instruction_sets = read_cpu().instruction_sets
    unit = next((name for name in reversed(loaded.units) if name in instruction_sets), loaded.units[0])
    return NativeSampler(loaded.library, unit, threads)
