"""The weights of a rank as tensors, of which quantized ones are widened for every product, and its matrix products.

Letters: N rows of a weight, K columns, G groups of columns; T rows of a product; D, F the sizes of a product.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from .....checkpoint.read.stored_array import StoredArray
from .....core.casts import Array
from .....core.dtypes import FP32, DType
from .....core.local_params import LocalParam
from .....core.quantization import untransposed
from .....parallel.coded_weight import MOST_VALUES, CodedWeight
from .....parallel.collectives import tree_sum
from .....parallel.linear import product
from .....parallel.products import linear
from .....parallel.torch_dtypes import torch_dtype
from .....parallel.wide_sums import embedding
from ...program.lower import Program
from ...program.operations import Head, Multiply, Route, WeightMatrix
from ...program.quantization import groupings
from .pages import CPU


@dataclass(frozen=True, slots=True, eq=False)
class CodedProduct:
    """A matrix product with a quantized weight: [T, K] -> [T, N].

    Attributes:
        num_slices: the number of slices of K that are summed apart and added as a binary tree.
        bias: the bias [N]; None without one.
    """

    weight: CodedWeight
    num_slices: int
    bias: torch.Tensor | None

    @property
    def shapes(self) -> tuple[object, ...]:
        """The sizes on which the order of sums may depend."""
        return (self.weight.grouping, *self.weight.shape, self.num_slices, self.bias is not None)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        parts = [tree_sum(self._row_sums(x_TK, self.weight[rows], rows)) for rows in self._parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def slice_sums(self, x_TK: torch.Tensor) -> list[torch.Tensor]:
        """Returns the sum of each slice, [T, N] in fp32."""
        x_TK = x_TK.float()
        parts = [self._row_sums(x_TK, self.weight[rows].float(), rows) for rows in self._parts()]
        return [torch.cat(of_rows, dim=-1) for of_rows in zip(*parts, strict=True)]

    def _parts(self) -> list[slice]:
        """Returns the rows that are widened together."""
        num_rows, columns = self.weight.shape
        step = max(1, MOST_VALUES // columns)
        return [slice(first, first + step) for first in range(0, num_rows, step)]

    def _row_sums(self, x_TK: torch.Tensor, wide_NK: torch.Tensor, rows: slice) -> list[torch.Tensor]:
        """Returns the sum of each slice of some widened rows, in the dtype of x."""
        bias = None if self.bias is None else self.bias[rows].to(x_TK.dtype)
        if self.num_slices == 1:
            return [linear(x_TK, wide_NK, bias)]
        pairs = zip(x_TK.chunk(self.num_slices, -1), wide_NK.chunk(self.num_slices, -1), strict=True)
        return [linear(x, part) for x, part in pairs]


@dataclass(frozen=True, slots=True)
class PreparedProduct:
    """A matrix product: [..., D] -> [..., F].

    Attributes:
        slices: the weight, cut along D into slices that are summed apart and added as a binary tree.
        num_transposed: the number of transposed blocks of the weight; 0 if it is [F, D].
        bias: the bias [F], of a weight that is not cut; None without one.
    """

    slices: tuple[torch.Tensor, ...]
    num_transposed: int
    bias: torch.Tensor | None

    @property
    def shapes(self) -> tuple[object, ...]:
        """The sizes on which the order of sums may depend."""
        return (*(weight.shape for weight in self.slices), self.dtype, self.num_transposed, self.bias is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the product."""
        return self.slices[0].dtype

    def widened(self) -> "PreparedProduct":
        """Returns the product in fp32, which is not rounded to the dtype of its input."""
        bias = None if self.bias is None else self.bias.float()
        return replace(self, slices=tuple(weight.float() for weight in self.slices), bias=bias)

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        return tree_sum(self._sums(x_ND.to(self.dtype)))

    def slice_sums(self, x_ND: torch.Tensor) -> list[torch.Tensor]:
        """Returns the sum of each slice, [..., F] in fp32."""
        return self._sums(x_ND.float()) if self.dtype == torch.float32 else self.widened()._sums(x_ND.float())

    def unrounded(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns the product in fp32, [..., F]; on a GPU by its products of 16 bits, whose sums are fp32."""
        if x_ND.device.type != "cuda" or self.dtype == torch.float32:
            return tree_sum(self.slice_sums(x_ND))
        (weight,) = self.slices  # a GPU's sums in 16 bits are not cut
        blocks = weight.chunk(self.num_transposed) if self.num_transposed else (weight.t(),)
        parts = [torch.mm(x_ND, block, out_dtype=torch.float32) for block in blocks]
        y_NF = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y_NF if self.bias is None else y_NF + self.bias

    def _sums(self, x_ND: torch.Tensor) -> list[torch.Tensor]:
        if len(self.slices) == 1:
            return [product(x_ND, self.slices[0], self.num_transposed, self.bias)]
        inputs = x_ND.chunk(len(self.slices), dim=-1)
        return [product(x, w, self.num_transposed) for x, w in zip(inputs, self.slices, strict=True)]


AnyProduct: TypeAlias = PreparedProduct | CodedProduct


class PreparedWeights:
    """A rank's parameters by name.

    Args:
        program: the rank's program.
        dtype: the dtype of the parameters that are not quantized, and of products.
        weight_dtype: see EngineOptions.
        device: where they lie.

    Attributes:
        dtype: the dtype of products.
        key_factors: the factors of each layer's keys, [kv heads, E], in that dtype, which has powers of two; {} for
            a cache whose keys are not equalized.
    """

    def __init__(self, program: Program, dtype: DType, weight_dtype: str = "auto", device: torch.device = CPU) -> None:
        self.device = device
        self.dtype = torch_dtype(dtype)
        self.key_factors: dict[int, torch.Tensor] = {}
        self._format = dtype
        self._params: dict[str, torch.Tensor] = {}
        self._coded: dict[str, CodedWeight] = {}
        self._groupings = groupings(program, weight_dtype)
        self._wide = program.wide
        matrices = (each.matrix for each in program.operations if isinstance(each, Multiply))
        self._num_transposed = {matrix.name: matrix.num_transposed for matrix in matrices}

    def take(self, param: LocalParam, values: Array) -> None:
        """Quantizes a parameter that was read (see `load_params`), or copies it to memory that torch aligned."""
        grouping = self._groupings.get(param.name)
        if grouping is not None:
            rows = untransposed(values, self._num_transposed.get(param.name, 0))
            self._coded[param.name] = CodedWeight.of(rows, grouping, self.dtype, self.device)
            return
        stored = StoredArray(values, FP32 if param.name in self._wide else self._format).torch()
        self._params[param.name] = torch.empty(param.shape, dtype=stored.dtype, device=self.device).copy_(stored)

    def keep_key_factors(self, factors: Mapping[int, Array]) -> None:
        """Keeps factors, fp32 [kv heads, E] for each layer (see `KeyEqualizer.factors`)."""
        for layer, factors_KE in factors.items():
            self.key_factors[layer] = torch.from_numpy(factors_KE).to(self.device, self.dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._params[name]

    def rows(self, name: str) -> torch.Tensor | CodedWeight:
        """Returns a matrix of which rows will be taken."""
        return self._coded[name] if name in self._coded else self._params[name]

    def lookup(self, name: str, ids_T: torch.Tensor) -> torch.Tensor:
        """Looks up rows of a table: int64 [T] -> [T, D]."""
        return self._coded[name][ids_T] if name in self._coded else embedding(ids_T, self._params[name])

    def products(self, program: Program) -> dict[str, AnyProduct]:
        """Prepares a program's matrix products, by the names of their weights, as views of the parameters.

        Those of experts are not among them.
        """
        found: dict[str, AnyProduct] = {}
        for operation in program.operations:
            if isinstance(operation, Multiply | Route | Head):
                slices = operation.num_slices if isinstance(operation, Multiply) else 1
                made = self._product(operation.matrix, slices)
                if isinstance(operation, Route) and isinstance(made, PreparedProduct):  # no router is quantized
                    made = made.widened()
                found[operation.matrix.name] = made
        return found

    def _product(self, matrix: WeightMatrix, num_slices: int) -> AnyProduct:
        bias = self[matrix.bias] if matrix.bias else None
        if matrix.name in self._coded:
            return CodedProduct(self._coded[matrix.name], num_slices, bias)
        slices = self[matrix.name].chunk(num_slices, dim=0 if matrix.num_transposed else -1)
        return PreparedProduct(slices, matrix.num_transposed, bias)
