"""AdamW in C (adamw.c) over ctypes: one pass over the streams of a bucket, with the same bits at every cut."""

import ctypes
from pathlib import Path
from typing import Final

from ...core.native import NativeSource, NativeUnit, load_library

_FILE: Final = Path(__file__).with_name("adamw.c")
_X86: Final = ("x86_64",)
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_LEAST_PART: Final = 1 << 16  # elements for which a thread is worth its start


def _unit(name: str, flags: tuple[str, ...] = (), machines: tuple[str, ...] = ()) -> NativeUnit:
    return NativeUnit(name, _FILE, (f"-DTK_UNIT={name}", *flags), machines)


SOURCE: Final = NativeSource(
    name="adamw", units=(_unit("base"), _unit("avx2", ("-mavx2",), _X86), _unit("avx512", _AVX512, _X86))
)


class AdamWUpdate(ctypes.Structure):
    """One update of streams of `count` elements, by address, with its factors; `adamw_update` in adamw.c."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "bf16")),
        *((name, ctypes.c_float) for name in ("grad_factor", "decay_factor", "new_avg", "old_sq", "new_sq")),
        *((name, ctypes.c_float) for name in ("step_size", "root", "eps")),
        *((name, ctypes.c_int64) for name in ("first", "run", "stride", "start")),
        *((name, ctypes.c_uint32) for name in ("key", "word")),
    )


class NativeAdamW:
    """The update of one unit of the library.

    Args:
        library: the loaded library; all units of it stand in it.
        unit: the name of the unit.
    """

    def __init__(self, library: ctypes.CDLL, unit: str) -> None:
        self.unit = unit
        self._update = getattr(library, f"tk_adamw_{unit}")
        self._update.argtypes, self._update.restype = (ctypes.POINTER(AdamWUpdate), ctypes.c_int64), None

    def __call__(self, update: AdamWUpdate, threads: int) -> None:
        """Makes an update with up to `threads` threads; their number changes no bit."""
        self._update(update, max(1, min(threads, update.count // _LEAST_PART)))


def native_adamw() -> NativeAdamW | None:
    """Loads the library, or builds it; returns its update for this CPU, or None if there can be none here."""
    loaded = load_library(SOURCE)
    return None if loaded is None else NativeAdamW(loaded.library, loaded.best_unit)
