"""The argument block of sampler.c: it points to the options of rows, which are read in place, and to their results."""

import ctypes
from typing import Any, Final

import numpy as np

from .....core.casts import Array
from .....core.integers import ceil_div, round_up
from ...request.sampling_params import MAX_TOP_LOGPROBS
from ...step.sampler_output import NUM_CANDIDATES, SamplerOutput
from ...step.sampling_rows import NO_LOGPROBS, OPTION_COLUMNS, SamplingRows

# of scratch memory: see tk_sample_rows
_BLOCK: Final = 64  # tokens that passes over a row handle together
_TOKEN_BYTES: Final = 20  # a weight, a distance, an id and a logit
_BLOCK_BYTES: Final = 8  # its largest logit and its number
_NUMBERS: Final = ("vocab", "row_stride", "mask_stride", "top_width")
OPTIONS: Final = {
    **dict.fromkeys(("target", "num_top", "sample_index", "new_number", "mask"), "<i4"),
    **OPTION_COLUMNS,
    "seed": "<u8",
}
_STARTS: Final = ("bias_start", "count_start")
_ENTRIES: Final = ("bias_token", "bias_value", "count_token", "count_value")
_RESULTS: Final[dict[str, type[np.generic]]] = {
    "token_ids": np.int32,
    "finite": np.uint8,
    "logprob": np.float32,
    "rank": np.int32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "candidates": np.int32,
}


class SamplingBatch(ctypes.Structure):
    """The `sampling_batch` of sampler.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in ("logits", "masks", *OPTIONS, *_STARTS, *_ENTRIES, *_RESULTS)),
    ]

    def address_of(self, name: str) -> int:
        """Returns the address of a field."""
        return ctypes.addressof(self) + int(getattr(SamplingBatch, name).offset)


class SamplingBlock:
    """Arguments and results of the sampler for up to `capacity` rows.

    Args:
        capacity: the largest number of rows.
        vocab: the number of tokens of the vocabulary.
        top_width: the largest number of alternatives that a row requests.
        results: uint8 [results_bytes(capacity, top_width)], zeros, if the results lie in memory of the caller's.

    Attributes:
        batch: the block as C reads it; the caller sets `logits` and `row_stride`.
        capacity, top_width: as above.
    """

    def __init__(
        self, capacity: int, vocab: int, top_width: int = MAX_TOP_LOGPROBS, results: Array | None = None
    ) -> None:
        self.capacity, self.top_width = capacity, top_width
        self._starts = {name: np.zeros(capacity + 1, np.int64) for name in _STARTS}
        self._results = _divide(
            np.zeros(results_bytes(capacity, top_width), np.uint8) if results is None else results, capacity, top_width
        )
        self._borrowed: list[Array] = []  # arrays of the rows, which C reads in place
        arrays = self._starts | self._results
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        self.batch = SamplingBatch(vocab=vocab, top_width=top_width, **pointers)

    def fill(self, rows: SamplingRows, masks: Array | None = None) -> None:
        """Points to rows and masks, which are read where they are until the next call; numbers may change meanwhile.

        Args:
            masks: see `sampler.run_sampler`; None = the rows have none.
        """
        num_rows = len(rows)
        self._borrowed.clear()
        for name, dtype in OPTIONS.items():
            setattr(self.batch, name, self._borrow(getattr(rows, name), dtype))
        self._enter("bias", rows.bias_row, (rows.bias_token, rows.bias_value), num_rows)
        self._enter("count", rows.count_row, (rows.count_token, rows.count_value), num_rows)
        if masks is not None:
            self.batch.mask_stride, self.batch.masks = masks.shape[1], self._borrow(masks)
        else:
            self.batch.masks = None

    def output(self, num_rows: int, most: int, have_candidates: bool = False) -> SamplerOutput:
        """Returns a copy of the results of the first rows, with `most` alternatives each (see `most_alternatives`).

        Args:
            have_candidates: whether one of the rows reports candidates.
        """
        found = {name: column[:num_rows] for name, column in self._results.items()}
        found["candidates"] = found["candidates"][:, : NUM_CANDIDATES * have_candidates]
        if most == NO_LOGPROBS:
            return SamplerOutput.of_tokens(*(found[name].copy() for name in ("token_ids", "finite", "candidates")))
        found |= {name: found[name][:, :most] for name in ("top_ids", "top_logprobs")}
        return SamplerOutput(**{name: column.copy() for name, column in found.items()})

    def _enter(self, kind: str, row: Array, columns: tuple[Array, Array], num_rows: int) -> None:
        """Sets the entries of each row, which are in the order of the rows."""
        starts = self._starts[f"{kind}_start"]
        if not len(row):
            starts[:] = 0  # of more rows, too: those that C adds have none
            return
        starts[: num_rows + 1] = np.searchsorted(row, np.arange(num_rows + 1))
        for name, column in zip(("token", "value"), columns, strict=True):
            setattr(self.batch, f"{kind}_{name}", self._borrow(column))

    def _borrow(self, array: Array, dtype: str | None = None) -> int:
        self._borrowed.append(np.ascontiguousarray(array, dtype))
        return int(self._borrowed[-1].ctypes.data)


def results_bytes(capacity: int, top_width: int = MAX_TOP_LOGPROBS) -> int:
    """Returns the bytes of the results of `capacity` rows."""
    return sum(_bytes(name, capacity, top_width) for name in _RESULTS)


def scratch_bytes(vocab: int) -> int:
    """Returns the bytes of the scratch memory that a thread of the sampler in C needs, a multiple of 64."""
    num_blocks = ceil_div(vocab, _BLOCK)
    return round_up((num_blocks + 1) * _BLOCK * _TOKEN_BYTES + num_blocks * _BLOCK_BYTES, 64)


def most_alternatives(rows: SamplingRows) -> int:
    """Returns the largest number of alternatives that one of the rows requests, or NO_LOGPROBS."""
    return int(rows.num_top.max(initial=NO_LOGPROBS))


def _divide(memory: Array, capacity: int, top_width: int) -> dict[str, Array]:
    """Returns the columns of results in `memory`; those of one byte per row are last, so that all are aligned."""
    found: dict[str, Array] = {}
    start = 0
    for name in sorted(_RESULTS, key=lambda name: -np.dtype(_RESULTS[name]).itemsize):
        stop = start + _bytes(name, capacity, top_width)
        column: Any = memory[start:stop].view(_RESULTS[name])
        found[name] = column if (width := _width(name, top_width)) is None else column.reshape(capacity, width)
        start = stop
    return found


def _bytes(name: str, capacity: int, top_width: int) -> int:
    width = _width(name, top_width)
    return np.dtype(_RESULTS[name]).itemsize * capacity * (1 if width is None else width)


def _width(name: str, top_width: int) -> int | None:
    """Returns the number of values of a row in a column of results; None = it is one, without an axis of its own."""
    if name == "candidates":
        return NUM_CANDIDATES
    return top_width if name.startswith("top_") else None
