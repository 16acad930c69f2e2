"""Causal attention in C (attention.c) over ctypes, for CPUs that multiply bf16 in vectors."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

from ...core.cpu import read_cpu
from ...core.native import NativeSource, NativeUnit, load_library

_FILE: Final = Path(__file__).with_name("attention.c")
_BF16: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mprefer-vector-width=512")
WIDTHS: Final = 64  # heads of multiples of it
_UNIT: Final = "avx512_bf16"

SOURCE: Final = NativeSource(
    name="attention",
    units=(
        NativeUnit("base", _FILE, ("-DTK_UNIT=base",)),
        NativeUnit(_UNIT, _FILE, (f"-DTK_UNIT={_UNIT}", *_BF16), ("x86_64",)),
    ),
)


class HeadsView(ctypes.Structure):
    """A tensor [batch, length, heads, width] of bf16, by address and strides; `view` in attention.c."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("of_batch", "of_row", "of_head")),
    )


class AttentionCall(ctypes.Structure):
    """One call; `attention_call` in attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "length", "heads", "key_heads", "width")),
        ("scale", ctypes.c_float),
        *((name, HeadsView) for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        ("lse", ctypes.c_void_p),
        ("failed", ctypes.c_int64),
    )


class NativeAttention:
    """The kernel of a loaded library.

    Args:
        library: as it was loaded, with the unit for bf16.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = getattr(library, f"tk_attention_{_UNIT}")
        self._run.argtypes, self._run.restype = (ctypes.POINTER(AttentionCall), ctypes.c_int64, ctypes.c_int64), None

    def __call__(self, call: AttentionCall, *, backward: bool, threads: int) -> None:
        """Runs forward or backward with up to `threads` threads; their number changes no bit.

        Raises:
            MemoryError: there was no memory for a thread's blocks.
        """
        self._run(call, int(backward), threads)
        if call.failed:
            raise MemoryError("attention has no memory for its blocks: train shorter rows, or with fewer threads.")


@cache
def native_attention() -> NativeAttention | None:
    """Loads the library, or builds it; None if it cannot be had, or if this CPU gains nothing from it.

    A CPU with AMX has torch's kernel, which uses that.
    """
    sets = read_cpu().instruction_sets
    if _UNIT not in sets or "amx" in sets:
        return None
    loaded = load_library(SOURCE)
    return NativeAttention(loaded.library) if loaded and _UNIT in loaded.units else None
