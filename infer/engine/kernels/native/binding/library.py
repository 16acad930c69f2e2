"""The native library of kernels: its sources, and its functions for one instruction set."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ......core.cpu import read_cpu
from ......core.native import NativeSource, NativeUnit, load_library
from .structures import EngineChannel, NativeModel, PackedMatrix

_FOLDER: Final = Path(__file__).parents[1] / "c"
# From the plainest to the fastest; the names are those of the units and of core/cpu's instruction sets.
INSTRUCTION_SETS: Final = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
BF16_SETS: Final = ("avx512_bf16", "amx")  # for other dtypes their kernels are those of avx512
_X86: Final = ("x86_64",)
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_BF16: Final = (*_AVX512, "-mavx512bf16", "-mavx512vnni")  # every CPU with the first has the second
_AMX: Final = (*_BF16, "-mamx-tile", "-mamx-bf16")


def _unit(name: str, flags: tuple[str, ...] = (), machines: tuple[str, ...] = _X86) -> NativeUnit:
    return NativeUnit(name, _FOLDER / "kernels.c", (f"-DTK_NAME={name}", *flags), machines)


SOURCE: Final = NativeSource(
    "kernels",
    (
        _unit("baseline", ("-O2",), machines=()),  # -O3 takes three times as long to compile it, and is not faster
        _unit("avx2", _AVX2),
        _unit("avx512", _AVX512),
        _unit("avx512_bf16", ("-DTK_DOT_BF16", *_BF16)),
        _unit("amx", ("-DTK_AMX", *_AMX)),
        NativeUnit("threads", _FOLDER / "threads.c"),
        NativeUnit("pack", _FOLDER / "pack.c"),
    ),
    headers=tuple(sorted(_FOLDER.glob("*.h"))),
)


@dataclass(frozen=True)
class Kernels:
    """The functions of c/ for one instruction set.

    Attributes:
        instruction_set: the name of the instruction set.
        column_step: the columns of bf16 weights that a sum takes together, to a multiple of which a slice is packed;
            then rows are rounded to bf16 before a product. 0: rows stay fp32.
        refusal: returns the reason, as bytes, why this machine must not use the kernels; b"" if there is none. It is
            called before threads start.
        step: computes a model's step, and the logits of its first `head_count` wanted rows.
        decode_ahead: computes further steps for the engine at the other end of a socket; returns their number.
        head: computes the logits of `head_count` wanted rows of the last step, from `head_first` on.
        sample: samples the rows whose logits a `step` or `head` without sampling computed.
        multiply: a product alone: packed weight, rows, stride, number of rows, result, its stride.
        pack: packs a weight: its structure with `data`, source, bytes of a value, strides of rows and columns.
        pack_codes: packs a quantized weight: its structure with zeroed `data`, codes, headers of groups.
        start_threads: starts a model's threads and returns their number.
        stop_threads: ends a model's threads.
    """

    instruction_set: str
    column_step: int
    refusal: Callable[[], bytes]
    step: Callable[..., Any]
    decode_ahead: Callable[..., Any]
    head: Callable[..., Any]
    sample: Callable[..., Any]
    multiply: Callable[..., Any]
    pack: Callable[..., Any]
    pack_codes: Callable[..., Any]
    start_threads: Callable[..., Any]
    stop_threads: Callable[..., Any]


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets that this machine can run and compile, from the plainest to the fastest."""
    loaded = load_library(SOURCE)
    if loaded is None:
        return ()
    runs = {"baseline", *read_cpu().instruction_sets}
    return tuple(name for name in INSTRUCTION_SETS if name in loaded.units and name in runs)


def load_kernels(instruction_set: str) -> Kernels | None:
    """Loads the functions for an instruction set; None if this machine has no library, which the log explains."""
    loaded = load_library(SOURCE)
    if loaded is None or instruction_set not in loaded.units:
        return None
    library, model, matrix = loaded.library, POINTER(NativeModel), POINTER(PackedMatrix)
    rows = [c_void_p, c_int64, c_int64, c_void_p, c_int64]
    return Kernels(
        instruction_set,
        int(_function(library, f"tk_column_step_{instruction_set}", [], c_int32)()),
        _function(library, f"tk_refusal_{instruction_set}", [], c_char_p),
        _function(library, f"tk_step_{instruction_set}", [model]),
        _function(library, f"tk_decode_ahead_{instruction_set}", [model, POINTER(EngineChannel)], c_int32),
        _function(library, f"tk_head_{instruction_set}", [model]),
        _function(library, f"tk_sample_{instruction_set}", [model]),
        _function(library, f"tk_multiply_{instruction_set}", [matrix, *rows]),
        _function(library, "tk_pack", [matrix, c_void_p, c_int64, c_int64, c_int64]),
        _function(library, "tk_pack_codes", [matrix, c_void_p, c_void_p]),
        _function(library, "tk_start_threads", [model, c_int32], c_int32),
        _function(library, "tk_stop_threads", [model]),
    )


def _function(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any = None) -> Callable[..., Any]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]
