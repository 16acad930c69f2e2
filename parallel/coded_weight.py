"""A quantized weight as tensors, which products widen block by block, never whole.

Letters: N rows of a weight (out features), K columns (in features), G groups of columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from ..core.casts import Array
from ..core.quantization import OFFSET, Grouping, quantize

MOST_VALUES: Final = 2**22  # of a weight that are widened at a time


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
        return self._widened(rows, slice(None))

    def row_blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the matrix as blocks of rows, [rows, K], widened one after the other."""
        num_rows, columns = self.shape
        step = max(1, MOST_VALUES // columns)
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            yield rows, self._widened(rows, slice(None))

    def column_blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the matrix as blocks of columns, [N, columns], widened one after the other."""
        num_rows, num_groups = self.scales.shape
        size = self.grouping.columns
        step = max(1, MOST_VALUES // (num_rows * size))
        for first in range(0, num_groups, step):
            groups = slice(first, min(first + step, num_groups))
            yield slice(groups.start * size, groups.stop * size), self._widened(slice(None), groups)

    def _widened(self, rows: slice | torch.Tensor, groups: slice) -> torch.Tensor:
        codes, scales = self.codes[rows][:, groups], self.scales[rows][:, groups].float().unsqueeze(-1)
        if self.minima is None:
            wide = (codes.float() - OFFSET) * scales
        else:
            pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., : self.grouping.columns]
            wide = pairs.float() * scales + self.minima[rows][:, groups].float().unsqueeze(-1)
        return wide.flatten(-2).to(self.dtype)


def _on(device: torch.device, values: Array) -> torch.Tensor:
    given = torch.from_numpy(values)
    return torch.empty(given.shape, dtype=given.dtype, device=device).copy_(given)
