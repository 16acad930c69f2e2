"""Number formats as widths and names, and the casts between them on numpy arrays, bit-equal to torch's.

numpy has no bfloat16, so its values travel as uint16 bit patterns. Codes are those of safetensors headers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CheckpointError, ConfigError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """A number format: its safetensors code, bytes per element, and the numpy dtype its bytes are held in."""

    code: str
    itemsize: int
    numpy: str

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers or truth values, which no change of a model's dtype touches."""
        return self.code[0] in "IU" or self.code == "BOOL"


BF16 = DType("BF16", 2, "<u2")
FP16 = DType("F16", 2, "<f2")
FP32 = DType("F32", 4, "<f4")
FP8_E4M3 = DType("F8_E4M3", 1, "|u1")
FP8_E5M2 = DType("F8_E5M2", 1, "|u1")
FP8_E8M0 = DType("F8_E8M0", 1, "|u1")  # powers of two: the scales of blocks
_ALL = (
    BF16,
    FP16,
    FP32,
    DType("F64", 8, "<f8"),
    FP8_E4M3,
    FP8_E5M2,
    FP8_E8M0,
    DType("I64", 8, "<i8"),
    DType("I32", 4, "<i4"),
    DType("I16", 2, "<i2"),
    DType("I8", 1, "|i1"),
    DType("U64", 8, "<u8"),
    DType("U32", 4, "<u4"),
    DType("U16", 2, "<u2"),
    DType("U8", 1, "|u1"),
    DType("BOOL", 1, "|b1"),
)
CASTABLE = (BF16, FP16, FP32)
_NAMES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


def by_code(code: str) -> DType:
    """The format with that safetensors code; CheckpointError if tk does not know it."""
    for dtype in _ALL:
        if dtype.code == code:
            return dtype
    raise CheckpointError(f"Unknown dtype {code!r} in a safetensors file; known are {', '.join(d.code for d in _ALL)}.")


def by_name(name: str) -> DType:
    """The format that the command line and configs call `name` (fp32, bf16, fp16); ConfigError otherwise."""
    if name not in _NAMES:
        raise ConfigError(f"Unknown dtype {name!r}; use one of {', '.join(_NAMES)}.")
    return _NAMES[name]


def name_of(dtype: DType) -> str:
    """The command line's name of a format: "fp32" for F32; the code in lower case where there is no shorter one."""
    return next((name for name, known in _NAMES.items() if known == dtype), dtype.code.lower())


def cast(values: Array, source: DType, target: DType, what: str = "the tensor") -> Array:
    """`values` (held as `source.numpy`) rounded to nearest even into `target`; NaN is kept.

    Raises:
        CheckpointError: a finite value is too large for fp16 (naming `what`), or no such cast exists.
    """
    if source == target:
        return values
    if source not in CASTABLE or target not in CASTABLE:
        raise CheckpointError(f"No cast from {source.code} to {target.code} for {what}; keep its dtype.")
    wide = _to_fp32(values, source)
    if target == FP32:
        return wide
    if target == BF16:
        return _fp32_to_bf16(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(FP16.numpy)
    if np.isinf(narrow).sum() != np.isinf(wide).sum():
        raise CheckpointError(f"{what} has values beyond fp16's largest, 65504; use bf16 or fp32.")
    return narrow


def widen(values: Array, dtype: DType) -> Array:
    """`values` as fp64: their exact values, but for integers of more than 53 bits."""
    if dtype == BF16:
        values = _to_fp32(values, dtype)
    elif dtype == FP8_E5M2:  # the upper half of an fp16
        values = (values.astype("<u2") << 8).view(FP16.numpy)
    elif dtype == FP8_E4M3:  # "FN" of arXiv 2209.05433: no infinities, and one NaN of either sign
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
