"""The quantization of weights: groups of columns, their codes and scales, in numpy.

A group is a run of columns of one output row. In 8 bits a group has a scale (symmetric), in 4 bits a scale and a
minimum (asymmetric), both rounded to bf16 before the codes are chosen.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from .casts import Array, cast
from .dtypes import BF16, FP32
from .integers import round_up

OFFSET: Final = 128  # codes of 8 bits are signed values plus this
MOST_COLUMNS: Final = MappingProxyType({8: 128, 4: 32})  # of a group, by the bits of a code
FEWEST_COLUMNS: Final = 8  # of a group; with fewer, scales would take too much room
HEADER_BYTES: Final = 4  # of a group: a scale in fp32, or a scale and a minimum in bf16
_LINE: Final = 16  # floats; rows begin on cache lines
_CHUNK: Final = 65536  # values that are quantized together, in a core's second cache


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the codes of a parameter are chosen.

    Attributes:
        bits: the bits of a code, 8 or 4.
        columns: the columns of a group.
    """

    bits: int
    columns: int

    @property
    def room(self) -> int:
        """The columns for which a group's codes have room: they fill whole words of 32 bits."""
        return round_up(self.columns, 32 // self.bits)

    @property
    def group_bytes(self) -> int:
        """The bytes of a group with its scale."""
        return HEADER_BYTES + self.room * self.bits // 8

    def row_floats(self, columns: int) -> int:
        """Returns the floats of a row of a product, as native kernels prepare it: padded groups, and their sums."""
        return round_up(columns // self.columns * (self.room + 1), _LINE)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A quantized matrix of N rows, K columns and G groups of columns.

    Attributes:
        grouping: the size of codes and groups.
        codes: uint8 [N, K], one code each.
        scales: fp32 [N, G].
        minima: fp32 [N, G]; zeros in 8 bits, whose codes are signed values plus `OFFSET`.
    """

    grouping: Grouping
    codes: Array
    scales: Array
    minima: Array

    def widen(self) -> Array:
        """Returns the values that the codes stand for, fp32 [N, K]."""
        offset = OFFSET if self.grouping.bits == 8 else 0
        values = self.codes.reshape(*self.scales.shape, -1).astype(np.float32) - np.float32(offset)
        return (values * self.scales[..., None] + self.minima[..., None]).reshape(self.codes.shape)


def group_columns(segment: int, bits: int) -> int:
    """Returns the largest divisor of a number of columns up to the most of a group."""
    return max(size for size in range(1, min(segment, MOST_COLUMNS[bits]) + 1) if segment % size == 0)


def untransposed(values: Array, num_transposed: int) -> Array:
    """Returns a weight as rows of outputs, [out, in], from `num_transposed` blocks [in, out / n], if it is not 0."""
    if not num_transposed:
        return values
    blocks = values.reshape(num_transposed, -1, values.shape[-1])
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, blocks.shape[1])


def quantize(values: Array, grouping: Grouping) -> Codes:
    """Rounds a matrix to the nearest codes; a group that is not finite gets a scale of NaN, which reaches the logits.

    Args:
        values: fp32 [N, K]; groups divide K.
        grouping: the size of codes and groups.
    """
    rows, columns = values.shape
    shape = rows, columns // grouping.columns
    found = Codes(grouping, np.empty(values.shape, np.uint8), np.empty(shape, FP32.numpy), np.empty(shape, FP32.numpy))
    step = max(1, _CHUNK // max(1, columns))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        groups = values[part].reshape(-1, shape[1], grouping.columns)
        choose = _symmetric if grouping.bits == 8 else _asymmetric
        codes, found.scales[part], found.minima[part] = choose(groups)
        found.codes[part] = codes.reshape(-1, columns)
    return found


def _symmetric(groups: Array) -> tuple[Array, Array, Array]:
    scales = np.maximum(groups.max(axis=-1), -groups.min(axis=-1)) / np.float32(OFFSET - 1)
    groups, scales = _finite(groups, scales)
    codes = np.rint(groups / _divisors(scales))
    codes += np.float32(OFFSET)
    return codes.clip(1, 2 * OFFSET - 1, out=codes).astype(np.uint8), scales, np.zeros_like(scales)


def _asymmetric(groups: Array) -> tuple[Array, Array, Array]:
    low = groups.min(axis=-1)
    minima, scales = _bf16(low), _bf16((groups.max(axis=-1) - low) / np.float32(15))
    groups, scales = _finite(groups, scales)
    codes = groups - np.where(np.isfinite(minima), minima, 0)[..., None]
    codes /= _divisors(scales)
    return np.rint(codes).clip(0, 15).astype(np.uint8), scales, minima


def _finite(groups: Array, scales: Array) -> tuple[Array, Array]:
    """Returns groups with zeros, and scales with NaN, where a group is not finite."""
    finite = np.isfinite(scales)
    if finite.all():
        return groups, scales
    return np.where(finite[..., None], groups, np.float32(0)), np.where(finite, scales, np.float32(np.nan))


def _divisors(scales: Array) -> Array:
    """Returns the scales to divide by: 1 where all values of a group are the same, or not finite."""
    return np.where(scales > 0, scales, np.float32(1))[..., None]


def _bf16(values: Array) -> Array:
    return cast(cast(values, FP32, BF16), BF16, FP32)
