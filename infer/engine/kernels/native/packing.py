"""The packing of a rank's weights into panels as they are loaded, each parameter once."""

from collections.abc import Callable, Iterator
from ctypes import byref
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from .....core.casts import Array, cast
from .....core.dtypes import BF16, FP32, DType
from .....core.integers import ceil_div, round_up
from .....core.local_params import LocalParam
from .....core.quantization import Codes, Grouping, quantize, untransposed
from ...program.lower import Program
from ...program.operations import Embed, Head, Multiply, Reduce, Route, RunExperts, WeightMatrix
from ...program.quantization import groupings
from .binding.library import Kernels
from .binding.memory import CACHE_LINE, LARGE_PAGE, Arena, aligned
from .binding.structures import PANEL, Format, PackedMatrix

# By the bits of a code: for products with rows of fp32, and with rows of bf16.
_CODES: Final = MappingProxyType({8: Format.CODES8, 4: Format.CODES4})
_PAIRS: Final = MappingProxyType({8: Format.PAIRS8, 4: Format.PAIRS4})


def format_of(dtype: DType) -> Format:
    """Returns the format in which weights or keys of a dtype are stored."""
    return Format[dtype.name.upper()]


def pair_bytes(format_: Format) -> int:
    """Returns the bytes of a pair of columns of a panel."""
    return (
        PANEL * {Format.FP32: 8, Format.BF16: 4, Format.FP16: 4, Format.FP8: 2, Format.INT8: 2, Format.INT4: 1}[format_]
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter of matrices that are packed apart, one behind the other.

    Attributes:
        count: the number of matrices, rows below each other in the parameter (experts; 1 otherwise).
        inputs, outputs: the sizes of each.
        num_transposed: see WeightMatrix.
        slices: see Multiply.num_slices.
        grouping: how the weight is quantized; None if it is not.
    """

    count: int
    inputs: int
    outputs: int
    num_transposed: int = 0
    slices: int = 1
    grouping: Grouping | None = None

    def panel_bytes(self, format_: Format, column_step: int) -> int:
        """Returns the bytes of a panel; slices are padded to a multiple of `column_step` columns."""
        if self.grouping is not None:
            return self.inputs // self.grouping.columns * self.grouping.group_bytes * PANEL
        return self.slices * round_up(self.inputs // self.slices, column_step) // 2 * pair_bytes(format_)

    def matrix_bytes(self, format_: Format, column_step: int) -> int:
        """Returns the bytes of one matrix."""
        return ceil_div(self.outputs, PANEL) * self.panel_bytes(format_, column_step)


@dataclass
class PackedWeights:
    """A rank's weights, which `take` receives one by one.

    Attributes:
        memory: the bytes of the packed parameters; those of a file make weights that have been packed before.
        vectors: norms, biases and the gates of sums in fp32.
        tables: the embeddings that are read by row and are neither quantized nor the head, in the weights' dtype.
        key_factors: those of each layer (see `KeyEqualizer.factors`); {} for a cache whose keys are not equalized.
        matrices: the packed parameters, which point to `memory`; a bias is set where an operation has one.
    """

    program: Program
    dtype: DType
    kernels: Kernels
    weight_dtype: str = "auto"
    memory: dict[str, Array] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)
    tables: dict[str, Array] = field(default_factory=dict)
    key_factors: dict[int, Array] = field(default_factory=dict)
    matrices: dict[str, PackedMatrix] = field(init=False)

    def __post_init__(self) -> None:
        self._stacks = dict(stacks(self.program, self.weight_dtype))
        self._gates = {each.gate for each in self.program.operations if isinstance(each, Reduce)}
        self.matrices = {
            name: packed_matrix(self.kernels, self._stacks[name], memory, self.dtype)
            for name, memory in self.memory.items()
        }
        shape = format_of(self.dtype), _column_step(self.kernels, self.dtype)
        sizes = (each.count * each.matrix_bytes(*shape) for each in self._stacks.values())
        total = sum(round_up(size, CACHE_LINE) for size in sizes)
        self._allocate = Arena(total).take if total >= LARGE_PAGE and not self.memory else aligned

    def take(self, param: LocalParam, values: Array) -> None:
        """Packs or keeps a parameter."""
        if len(param.shape) == 1 or param.name in self._gates:
            dtype = FP32 if param.name in self.program.wide else self.dtype
            self.vectors[param.name] = padded_vector(values, dtype, param.name)
        elif param.name in self._stacks:
            stack = self._stacks[param.name]
            packed, memory = pack(self.kernels, stack, values, self.dtype, self._allocate)
            self.matrices[param.name], self.memory[param.name] = packed, memory
        else:
            self.tables[param.name] = np.array(values)


def padded_vector(values: Array, dtype: DType, name: str) -> Array:
    """Returns a vector in fp32 with zeros behind it, up to a whole panel."""
    wide = cast(values, dtype, FP32, name)
    memory = aligned(4 * ceil_div(wide.size, PANEL) * PANEL).view(np.float32)
    memory[: wide.size] = wide.reshape(-1)
    return memory


def pack(
    kernels: Kernels, stack: Stack, values: Array, dtype: DType, allocate: Callable[[int], Array] = aligned
) -> tuple[PackedMatrix, Array]:
    """Packs a parameter; returns its structure, which has no bias, and the memory that it points to.

    Args:
        kernels: the native functions.
        stack: the matrices of the parameter.
        values: the parameter; bf16 as bit patterns in uint16.
        dtype: the model's dtype, which is that of the values; those of a quantized weight are fp32 in any case.
        allocate: returns zeroed memory of a size in bytes.
    """
    format_, step = _format(kernels, stack, dtype), _column_step(kernels, dtype)
    panel_bytes, part_bytes = stack.panel_bytes(format_, step), stack.matrix_bytes(format_, step)
    memory = allocate(stack.count * part_bytes)
    for i, part in enumerate(values.reshape(stack.count, -1)):
        source = np.ascontiguousarray(part)
        if n := stack.num_transposed:
            source = untransposed(source.reshape(-1, stack.outputs // n), n)
        packed = _matrix(memory[i * part_bytes :], stack, format_, panel_bytes)
        if stack.grouping is None:
            kernels.pack(byref(packed), source.ctypes.data, dtype.itemsize, stack.inputs, 1)
        else:
            found = quantize(source.reshape(stack.outputs, stack.inputs), stack.grouping)
            headers = _headers(found)
            kernels.pack_codes(byref(packed), found.codes.ctypes.data, headers.ctypes.data)
    return _matrix(memory, stack, format_, panel_bytes), memory


def packed_matrix(kernels: Kernels, stack: Stack, memory: Array, dtype: DType) -> PackedMatrix:
    """Returns the structure, without a bias, of a parameter that `pack` has written into `memory`."""
    format_ = _format(kernels, stack, dtype)
    return _matrix(memory, stack, format_, stack.panel_bytes(format_, _column_step(kernels, dtype)))


def _format(kernels: Kernels, stack: Stack, dtype: DType) -> Format:
    if stack.grouping is None:
        return format_of(dtype)
    takes_bf16 = kernels.column_step > 0 and dtype == BF16
    return (_PAIRS if takes_bf16 else _CODES)[stack.grouping.bits]


def _column_step(kernels: Kernels, dtype: DType) -> int:
    """Returns the columns to a multiple of which slices are padded: a pair, or those that a bf16 instruction takes."""
    return max(2, kernels.column_step) if dtype == BF16 else 2


def _matrix(memory: Array, stack: Stack, format_: Format, panel_bytes: int) -> PackedMatrix:
    return PackedMatrix(
        data=memory.ctypes.data,
        bias=None,
        inputs=stack.inputs,
        outputs=stack.outputs,
        panel_bytes=panel_bytes,
        format=format_,
        slices=stack.slices,
        group=stack.grouping.columns if stack.grouping else 0,
    )


def _headers(codes: Codes) -> Array:
    """Returns the headers of groups as uint32 [rows, groups]: see c/codes.h."""
    if codes.grouping.bits == 8:
        return np.ascontiguousarray(codes.scales).view(np.uint32)
    scales, minima = (cast(each, FP32, BF16).astype(np.uint32) for each in (codes.scales, codes.minima))
    headers: Array = scales | minima << 16
    return headers


def stacks(program: Program, weight_dtype: str = "auto") -> Iterator[tuple[str, Stack]]:
    """Yields the name and the shape of every parameter that is packed."""
    quantized = groupings(program, weight_dtype)
    for name, stack in _plain_stacks(program):
        yield name, replace(stack, grouping=quantized.get(name))
    for operation in program.operations:
        if isinstance(operation, Embed) and operation.table in quantized:
            yield (
                operation.table,
                Stack(1, program.hidden_size, operation.num_rows, grouping=quantized[operation.table]),
            )


def _plain_stacks(program: Program) -> Iterator[tuple[str, Stack]]:
    for operation in program.operations:
        if isinstance(operation, Multiply):
            yield operation.matrix.name, _stack(operation.matrix, operation.num_slices)
        elif isinstance(operation, Route | Head):
            yield operation.matrix.name, _stack(operation.matrix)
        elif isinstance(operation, RunExperts):
            count, inner, hidden = operation.num_experts, operation.inner, program.hidden_size
            yield operation.gate_up, Stack(count, hidden, 2 * inner)
            yield operation.down, Stack(count, inner, hidden, slices=operation.num_slices)


def _stack(matrix: WeightMatrix, slices: int = 1) -> Stack:
    return Stack(1, matrix.in_features, matrix.out_features, matrix.num_transposed, slices)
