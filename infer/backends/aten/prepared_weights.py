"""The weights of a rank as tensors, and its matrix products."""

from dataclasses import dataclass

import torch

from ....checkpoint.read.stored_array import StoredArray
from ....core.casts import Array
from ....core.dtypes import DType
from ....core.local_params import LocalParam
from ....parallel.collectives import tree_sum
from ....parallel.linear import product
from ....parallel.torch_dtypes import torch_dtype
from ...program.lower import Program
from ...program.operations import Head, Multiply, Route, WeightMatrix


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

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        if len(self.slices) == 1:
            return product(x_ND, self.slices[0], self.num_transposed, self.bias)
        inputs = x_ND.chunk(len(self.slices), dim=-1)
        return tree_sum([product(x, w, self.num_transposed) for x, w in zip(inputs, self.slices, strict=True)])


class PreparedWeights:
    """A rank's parameters by name, on torch's default device.

    Args:
        dtype: the dtype of the parameters.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = torch_dtype(dtype)
        self._format = dtype
        self._params: dict[str, torch.Tensor] = {}

    def take(self, param: LocalParam, values: Array) -> None:
        """Copies a parameter that was read (see `load_params`) to memory that torch aligned."""
        self._params[param.name] = torch.empty(param.shape, dtype=self.dtype).copy_(
            StoredArray(values, self._format).torch()
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._params[name]

    def products(self, program: Program) -> dict[str, PreparedProduct]:
        """Prepares a program's matrix products, by the names of their weights, as views of the parameters.

        Those of experts are not among them.
        """
        found = {}
        for operation in program.operations:
            if isinstance(operation, Multiply | Route | Head):
                slices = operation.num_slices if isinstance(operation, Multiply) else 1
                found[operation.matrix.name] = self._product(operation.matrix, slices)
        return found

    def _product(self, matrix: WeightMatrix, num_slices: int) -> PreparedProduct:
        slices = self[matrix.name].chunk(num_slices, dim=0 if matrix.num_transposed else -1)
        return PreparedProduct(slices, matrix.num_transposed, self[matrix.bias] if matrix.bias else None)
