"""Products of the native kernels alone, and libraries whose kernels run on models of instructions."""

from ctypes import byref
from dataclasses import replace

from tk.core.casts import Array, cast
from tk.core.dtypes import FP32, DType
from tk.core.native import NativeSource, NativeUnit
from tk.infer.engine.kernels.native.binding.library import SOURCE, Kernels, load_kernels
from tk.infer.engine.kernels.native.binding.memory import floats
from tk.infer.engine.kernels.native.packing import Stack, pack

ROWS = (*range(1, 18), 31, 32, 33, 511, 512)
MODELS = ("dot_model", "amx_model")  # the kernels for avx512_bf16 and amx, on models of their instructions


def portable() -> NativeSource:
    """Returns the kernels for AVX-512, AVX512_BF16 and AMX as code that every machine runs, beside the plainest."""
    base, *_, threads, pack_unit = SOURCE.units
    # -O1: these units take three times as long to compile with -O3, and tests on them are not faster.
    names = {"wide": (), "dot_model": ("-DTK_DOT_BF16",), "amx_model": ("-DTK_AMX",)}
    units = (
        NativeUnit(name, base.source, ("-O1", f"-DTK_NAME={name}", "-DTK_WIDTH=16", *flags))
        for name, flags in names.items()
    )
    return replace(SOURCE, name="portable", units=(base, *units, threads, pack_unit))


def load(name: str) -> Kernels:
    """Returns the kernels of an instruction set that this machine has, or has a model of."""
    kernels = load_kernels(name)
    assert kernels is not None
    return kernels


def multiply(kernels: Kernels, stack: Stack, weight: Array, dtype: DType, x: Array) -> Array:
    """Returns rows of `x` times a weight [out, in], of a model in a dtype."""
    assert kernels.refusal() == b""  # Linux permits a process tiles of AMX only when it asks
    packed, memory = pack(kernels, stack, weight if stack.grouping else cast(weight, FP32, dtype), dtype)
    padded = floats(len(x), -(-x.shape[1] // 16) * 16 + 16)
    padded[:, : x.shape[1]] = x
    out = floats(len(x), -(-stack.outputs // 16) * 16)
    kernels.multiply(byref(packed), padded.ctypes.data, padded.shape[1], len(x), out.ctypes.data, out.shape[1])
    assert memory.size
    return out[:, : stack.outputs].copy()
