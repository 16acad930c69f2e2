"""The table of number formats: the names that tk, safetensors, numpy and torch give each, and its bytes per element.

Neither numpy nor torch is imported here; casts are in casts.py, torch's dtypes in parallel/torch_dtypes.py.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from .errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class DType:
    """A number format.

    Attributes:
        name: the format's name on the command line and in configurations.
        code: the format's name in the header of a safetensors file.
        itemsize: the number of bytes per element.
        numpy: the numpy dtype that holds its values; an unsigned integer of the same size if numpy lacks the format.
        torch: the format's name in torch and in Hugging Face's config.json.
    """

    name: str
    code: str
    itemsize: int
    numpy: str
    torch: str

    @property
    def is_integer(self) -> bool:
        """Whether the format holds integers or booleans; a change of a model's dtype does not convert these."""
        return self.code[0] in "IU" or self.code == "BOOL"


FP32: Final = DType("fp32", "F32", 4, "<f4", "float32")
BF16: Final = DType("bf16", "BF16", 2, "<u2", "bfloat16")
FP16: Final = DType("fp16", "F16", 2, "<f2", "float16")
FP8_E4M3: Final = DType("f8_e4m3", "F8_E4M3", 1, "|u1", "float8_e4m3fn")
FP8_E5M2: Final = DType("f8_e5m2", "F8_E5M2", 1, "|u1", "float8_e5m2")
FP8_E8M0: Final = DType("f8_e8m0", "F8_E8M0", 1, "|u1", "float8_e8m0fnu")  # powers of two: the scales of blocks
DTYPES: Final = (
    BF16,
    FP16,
    FP32,
    DType("f64", "F64", 8, "<f8", "float64"),
    FP8_E4M3,
    FP8_E5M2,
    FP8_E8M0,
    DType("i64", "I64", 8, "<i8", "int64"),
    DType("i32", "I32", 4, "<i4", "int32"),
    DType("i16", "I16", 2, "<i2", "int16"),
    DType("i8", "I8", 1, "|i1", "int8"),
    DType("u64", "U64", 8, "<u8", "uint64"),
    DType("u32", "U32", 4, "<u4", "uint32"),
    DType("u16", "U16", 2, "<u2", "uint16"),
    DType("u8", "U8", 1, "|u1", "uint8"),
    DType("bool", "BOOL", 1, "|b1", "bool"),
)
COMPUTE_DTYPES: Final = (FP32, BF16, FP16)  # the formats of a model's weights; `casts.cast` converts between them
COMPUTE_NAMES: Final = tuple(dtype.name for dtype in COMPUTE_DTYPES)
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]  # one of COMPUTE_NAMES, as a configuration's type
_BY_CODE: Final = MappingProxyType({dtype.code: dtype for dtype in DTYPES})


def by_code(code: str, where: str = "A tensor") -> DType:
    """Returns the format with that safetensors code.

    Args:
        where: the file and tensor with the code, for the message.

    Raises:
        CheckpointError: tk does not know the code.
    """
    if code not in _BY_CODE:
        raise CheckpointError(f"{where} has the unknown dtype {code!r}; tk knows {', '.join(_BY_CODE)}.")
    return _BY_CODE[code]


def by_name(name: str) -> DType:
    """Returns the format of weights that the command line and configurations call `name`.

    Raises:
        ConfigError: weights cannot have a format of that name.
    """
    for dtype in COMPUTE_DTYPES:
        if dtype.name == name:
            return dtype
    raise ConfigError(f"Unknown dtype {name!r}; use one of {', '.join(COMPUTE_NAMES)}.")
