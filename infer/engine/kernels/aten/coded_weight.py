"""A quantized weight on torch, whose codes are widened for every product.

Letters: N rows of the weight, K columns, G groups of columns; T rows of a product.
"""

from dataclasses import dataclass
from typing import Final

import torch

from .....core.casts import Array
from .....parallel.collectives import tree_sum
from .....parallel.products import linear
from ...program.quantization import OFFSET, Grouping, quantize

_MOST_VALUES: Final = 2**22  # of a weight that are widened at a time


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix [N, K] as codes of 8 bits, or of 4 bits with two in a byte.

    Attributes:
        grouping: the size of codes and groups.
        codes: uint8 [N, G, columns of a group], or half of the columns, rounded up.
        scales: [N, G], fp32 for codes of 8 bits, bf16 for 4.
        minima: bf16 [N, G] for codes of 4 bits; None for 8.
        dtype: the dtype of widened values.
    """

    grouping: Grouping
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    dtype: torch.dtype

    @staticmethod
    def of(values: Array, grouping: Grouping, dtype: torch.dtype, device: torch.device) -> "CodedWeight":
        """Quantizes a matrix, fp32 [N, K], on the host, and copies the codes to a device."""
        found = quantize(values, grouping)
        scales, minima = _on(device, found.scales), _on(device, found.minima)
        codes = _on(device, found.codes.reshape(*found.scales.shape, grouping.columns))
        if grouping.bits == 8:
            return CodedWeight(grouping, codes, scales, None, dtype)
        codes = torch.nn.functional.pad(codes, (0, grouping.columns % 2))
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        return CodedWeight(grouping, packed, scales.bfloat16(), minima.bfloat16(), dtype)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((self.scales.shape[0], self.scales.shape[1] * self.grouping.columns))

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Widens rows: [rows, K]."""
        codes, scales = self.codes[rows], self.scales[rows].float().unsqueeze(-1)
        if self.minima is None:
            wide = (codes.float() - OFFSET) * scales
        else:
            pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., : self.grouping.columns]
            wide = pairs.float() * scales + self.minima[rows].float().unsqueeze(-1)
        return wide.flatten(-2).to(self.dtype)


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
        num_rows, columns = self.weight.shape
        step = max(1, _MOST_VALUES // columns)
        parts = [self._rows(x_TK, slice(first, first + step)) for first in range(0, num_rows, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _rows(self, x_TK: torch.Tensor, rows: slice) -> torch.Tensor:
        bias, wide_NK = None if self.bias is None else self.bias[rows], self.weight[rows]
        if self.num_slices == 1:
            return linear(x_TK, wide_NK, bias)
        pairs = zip(x_TK.chunk(self.num_slices, -1), wide_NK.chunk(self.num_slices, -1), strict=True)
        return tree_sum([linear(x, part) for x, part in pairs])


def _on(device: torch.device, values: Array) -> torch.Tensor:
    given = torch.from_numpy(values)
    return torch.empty(given.shape, dtype=given.dtype, device=device).copy_(given)
