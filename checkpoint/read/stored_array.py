"""Values read from a checkpoint, with their true dtype."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...core.casts import Array
from ...core.dtypes import DType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Values with their true dtype, which numpy may lack (bf16, fp8).

    Attributes:
        values: the values; for a dtype that numpy lacks, their bit patterns.
        dtype: the true dtype.
    """

    values: Array
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; 1-D for a flat range."""
        return self.values.shape

    def numpy(self) -> Array:
        """Returns the values; a dtype that numpy lacks as bit patterns in unsigned integers (bf16: uint16)."""
        return self.values

    def torch(self) -> "torch.Tensor":
        """Returns the values as a tensor of the true dtype, which shares their memory."""
        import torch

        if np.dtype(self.dtype.numpy).name == self.dtype.torch:
            return torch.from_numpy(self.values)
        bits = np.dtype(f"i{self.dtype.itemsize}")
        return torch.from_numpy(self.values.view(bits)).view(getattr(torch, self.dtype.torch))
