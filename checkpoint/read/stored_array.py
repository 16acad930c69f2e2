"""Values that were read, with their true dtype."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...core.casts import Array
from ...core.dtypes import DType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Values as stored: `dtype` says what they are, also where numpy has no such dtype (bf16, fp8)."""

    values: Array
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents; 1-D for a flat range."""
        return self.values.shape

    def numpy(self) -> Array:
        """The values; formats that numpy lacks as bit patterns in unsigned integers (bf16: uint16)."""
        return self.values

    def torch(self) -> "torch.Tensor":
        """The values as a tensor of the true dtype, sharing memory."""
        import torch

        if np.dtype(self.dtype.numpy).name == self.dtype.torch:
            return torch.from_numpy(self.values)
        bits = np.dtype(f"i{self.dtype.itemsize}")
        return torch.from_numpy(self.values.view(bits)).view(getattr(torch, self.dtype.torch))
