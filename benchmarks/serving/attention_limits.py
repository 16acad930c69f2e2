"""What limits attention beside its kernels: exp and products in registers, and reads of the pages of a cache."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from tk.benchmarks.serving import readers
from tk.core.casts import Array
from tk.core.cpu import read_cpu
from tk.core.native import NativeSource, load_library
from tk.infer.engine.kernels.native.binding import library

SCORES: Final = 4096  # those of attention_limits.c, as its CHAINS
CHAINS: Final = 12
_FILE: Final = Path(__file__).with_name("attention_limits.c")
_UNITS: Final = tuple(
    replace(unit, source=_FILE) for unit in library.SOURCE.units if unit.name in library.INSTRUCTION_SETS
)
SOURCE: Final = NativeSource("attention-limits", _UNITS, library.SOURCE.headers)
_VECTORS: Final = {"baseline": 8, "avx2": 8}  # floats; the other sets have 16
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """The limits of one core.

    Attributes:
        weight_seconds: of a score: exp, sum and rounding.
        floats, integers: the operations per second of products of fp32, and of pairs of int16.
    """

    weight_seconds: float
    floats: float
    integers: float

    def ceiling(self, products: float, head_dim: int) -> float:
        """Returns the operations per second of attention whose products take turns with exp, and with nothing else."""
        operations = 4 * head_dim  # of a score: a query times a key, a weight times a value
        return operations / (operations / products + self.weight_seconds)


def least(work: Callable[[], object], runs: int, clock: Clock = time.process_time) -> float:
    """Returns the least time of some runs by a clock, in seconds."""
    times = []
    for _ in range(runs):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def limits(instruction_set: str, runs: int) -> CoreLimits | None:
    """Measures the limits of an instruction set; None without a compiler."""
    loaded = load_library(SOURCE)
    if loaded is None or instruction_set not in loaded.units:
        return None
    functions = {}
    for name in ("weigh", "multiply_floats", "multiply_integers"):
        function = getattr(loaded.library, f"{name}_{instruction_set}")
        function.argtypes, function.restype = [c_int64], c_float
        functions[name] = function
    passes, count = 1000, 1_000_000
    lanes = CHAINS * _VECTORS.get(instruction_set, 16) * count
    return CoreLimits(
        least(lambda: functions["weigh"](passes), runs) / (passes * SCORES),
        2 * lanes / least(lambda: functions["multiply_floats"](count), runs),
        4 * lanes / least(lambda: functions["multiply_integers"](count), runs),
    )


def page_readers(pieces: Array, piece_bytes: int, threads: int) -> dict[str, Callable[[], object]]:
    """Returns readers of the pieces of a cache, whose threads have equal parts: a plain one, and one that prefetches.

    Args:
        pieces: their addresses, in order.
        piece_bytes: the bytes of each.
        threads: the number of threads.
    """
    loaded = load_library(readers.SOURCE)
    if loaded is None:
        return {}
    runs = {"baseline", *read_cpu().instruction_sets}
    unit = [each.name for each in readers.SOURCE.units if each.name in loaded.units and each.name in runs][-1]
    function = getattr(loaded.library, f"read_pieces_{unit}")
    function.argtypes, function.restype = [c_void_p, c_int64, c_int64, c_int32], c_uint64
    cuts = [len(pieces) * i // threads for i in range(threads + 1)]
    parts = [pieces[low:high] for low, high in pairwise(cuts)]

    def read(prefetch: int) -> object:
        if threads == 1:
            return function(pieces.ctypes.data, len(pieces), piece_bytes, prefetch)
        with ThreadPoolExecutor(threads) as pool:
            return [*pool.map(lambda part: function(part.ctypes.data, len(part), piece_bytes, prefetch), parts)]

    return {"plain reader": lambda: read(0), "reader that prefetches": lambda: read(1)}
