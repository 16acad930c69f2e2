"""The readers that batch-1 decoding is compared with: each reads the same packed weights as fast as it can."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.core.cpu import read_cpu
from tk.core.dtypes import BF16
from tk.core.native import NativeSource, NativeUnit, load_library
from tk.infer.engine.kernels.native.binding.library import Kernels
from tk.infer.engine.kernels.native.binding.memory import floats
from tk.infer.engine.kernels.native.packing import Stack, pack

_FILE: Final = Path(__file__).with_name("readers.c")
SOURCE: Final = NativeSource(
    "readers",
    (
        NativeUnit("baseline", _FILE, ("-DTK_NAME=baseline",)),
        NativeUnit("avx2", _FILE, ("-DTK_NAME=avx2", "-mavx2"), ("x86_64",)),
        NativeUnit("avx512", _FILE, ("-DTK_NAME=avx512", "-mavx512f"), ("x86_64",)),
    ),
)
NUM_BYTES: Final = 200_000_000
INPUTS: Final = 2048
PASSES: Final = 10
Pass = Callable[[int], object]  # reads the part of one thread, PASSES times


class MemoryReader:
    """A way to read memory on several threads, as a contestant whose speed "read" is in bytes per second."""

    def __init__(self, name: str, read: Pass, threads: int, num_bytes: int) -> None:
        self.name = name
        self._read = read
        self._threads = threads
        self._num_bytes = num_bytes

    def run(self, _: SpeedWorkload) -> Speeds:
        """Reads all of it PASSES times."""
        with ThreadPoolExecutor(self._threads) as pool:
            start = time.perf_counter()
            list(pool.map(self._read, range(self._threads)))
            seconds = time.perf_counter() - start
        return {"read": PASSES * self._num_bytes / seconds}


def readers(kernels: Kernels, threads: int, num_bytes: int = NUM_BYTES) -> list[MemoryReader]:
    """Returns the readers: a plain loop, a loop that prefetches, and the product of one row with weights in bf16.

    Args:
        kernels: the kernels of the instruction set that serves.
        threads: the number of threads, of which each has a part of the weights.
        num_bytes: the bytes of the weights.
    """
    outputs = num_bytes // threads // (2 * INPUTS)
    values = (np.random.default_rng(0).standard_normal((outputs, INPUTS), np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    parts = [pack(kernels, Stack(1, INPUTS, outputs), values, BF16) for _ in range(threads)]
    x, out = floats(threads, INPUTS + 16), floats(threads, outputs + 16)
    x[:] = 1.0

    def multiply(thread: int) -> None:
        for _ in range(PASSES):
            matrix = byref(parts[thread][0])
            kernels.multiply(matrix, x[thread].ctypes.data, x.shape[1], 1, out[thread].ctypes.data, out.shape[1])

    def plain(function: Callable[..., Any]) -> Pass:
        return lambda thread: function(parts[thread][1].ctypes.data, len(parts[thread][1]), PASSES)

    ways: dict[str, Pass] = {name: plain(function) for name, function in read_loops().items()}
    ways["linear kernel"] = multiply
    read = sum(len(memory) for _, memory in parts)
    return [MemoryReader(name, way, threads, read) for name, way in ways.items()]


def read_loops() -> Mapping[str, Callable[[int, int, int], int]]:
    """Returns the loops of readers.c for this CPU: functions of an address, its bytes and a number of passes.

    They return the sum of all 64-bit words in all passes. Without a compiler there are none.
    """
    loaded = load_library(SOURCE)
    if loaded is None:
        return {}
    runs = {"baseline", *read_cpu().instruction_sets}
    unit = [unit.name for unit in SOURCE.units if unit.name in loaded.units and unit.name in runs][-1]
    loops: dict[str, Callable[[int, int, int], int]] = {}
    for name, symbol in (("plain loop", "read_plain"), ("prefetched loop", "read_prefetched")):
        function = getattr(loaded.library, f"{symbol}_{unit}")
        function.argtypes, function.restype = [c_void_p, c_int64, c_int64], c_uint64
        loops[name] = function
    return loops
