"""Casts between number formats on numpy arrays, bit-equal to torch's.

numpy has neither bfloat16 nor 8-bit floats: arrays hold the bit patterns of bfloat16 as uint16, of 8-bit floats as
uint8.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import BF16, COMPUTE_DTYPES, FP8_E4M3, FP8_E5M2, FP8_E8M0, FP16, FP32, DType
from .errors import CheckpointError

Array = npt.NDArray[Any]


def cast(values: Array, source: DType, target: DType, what: str = "the tensor") -> Array:
    """Rounds `values` (an array of dtype `source.numpy`) to nearest even in `target`; NaN stays NaN.

    Args:
        what: the name of the tensor, for messages.

    Raises:
        CheckpointError: a finite value is too large for fp16, or tk cannot cast between these two formats.
    """
    if source == target:
        return values
    if source not in COMPUTE_DTYPES or target not in COMPUTE_DTYPES:
        raise CheckpointError(f"tk cannot cast {what} from {source.code} to {target.code}; keep its dtype.")
    wide = _to_fp32(values, source)
    if target == FP32:
        return wide
    if target == BF16:
        return _fp32_to_bf16(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(FP16.numpy)
    if np.isinf(narrow).sum() != np.isinf(wide).sum():
        raise CheckpointError(f"{what} has values that exceed fp16's maximum of 65504; use bf16 or fp32.")
    return narrow


def widen(values: Array, dtype: DType) -> Array:
    """Converts `values` to fp64, which is exact except for integers of more than 53 bits."""
    if dtype == BF16:
        values = _to_fp32(values, dtype)
    elif dtype == FP8_E5M2:  # the upper half of an fp16
        values = (values.astype("<u2") << 8).view(FP16.numpy)
    elif dtype == FP8_E4M3:  # the variant "FN" of arXiv 2209.05433: no infinities, one NaN of each sign
        exponent, mantissa = (values.astype("<i4") >> 3) & 15, values.astype("<i4") & 7
        sizes = np.ldexp(np.where(exponent == 0, mantissa, 8 + mantissa).astype("<f8"), np.maximum(exponent, 1) - 10)
        values = np.where(values & 0x7F == 0x7F, np.nan, np.where(values & 0x80, -sizes, sizes))
    elif dtype == FP8_E8M0:
        values = np.where(values == 0xFF, np.nan, np.ldexp(1.0, values.astype("<i4") - 127))
    return values.astype("<f8")


def _to_fp32(values: Array, source: DType) -> Array:
    if source == BF16:
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4", copy=False)


def _fp32_to_bf16(values: Array) -> Array:
    bits = np.asarray(values, order="C").view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16  # wraps only for NaNs, which are replaced below
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")
