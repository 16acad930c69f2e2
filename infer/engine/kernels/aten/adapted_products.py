"""The products with the factors of adapters, beside those with weights, for the rows that have an adapter.

u = A x is rounded once to the dtype of x. scale B u joins the fp32 sum of W x, slice by slice, before that is rounded.
Rows without an adapter keep the bits that they have in a step without adapters. Letters as in `prepared_weights.py`,
R the ranks of all adapters of one weight, r the rank of one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .....checkpoint.read.stored_array import StoredArray
from .....core.dtypes import DType
from .....parallel.collectives import tree_sum
from .....parallel.products import wide_linear
from ...program.adapters import WeightAdapter
from .prepared_weights import AnyProduct
from .row_tiles import SMALLEST


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """The factors of one adapter beside one weight.

    Attributes:
        down: A of all pairs, [R, D].
        ups: of each pair B [F, r], its first output, its first row of A and its scale.
    """

    down: torch.Tensor
    ups: tuple[tuple[torch.Tensor, int, int, float], ...]

    @staticmethod
    def of(adapter: WeightAdapter, dtype: DType, device: torch.device) -> "LowRankProduct":
        """Copies the factors of an adapter, of that dtype, to a device."""
        down, *ups = (
            StoredArray(each, dtype).torch().to(device) for each in (adapter.down, *(up.values for up in adapter.ups))
        )
        places = ((each.first_row, each.first_rank, each.scale) for each in adapter.ups)
        return LowRankProduct(down, tuple((up, *place) for up, place in zip(ups, places, strict=True)))

    def add_to(self, sums: Sequence[torch.Tensor], rows: slice, x_TD: torch.Tensor) -> None:
        """Adds the products of some rows to the sums of slices, each fp32 [T, F].

        A fixed number of rows is multiplied at a time, so that a row's bits do not depend on the others.
        """
        padded_TD = F.pad(x_TD[rows], (0, 0, 0, -(rows.stop - rows.start) % SMALLEST))
        for first, tile_TD in zip(range(rows.start, rows.stop, SMALLEST), padded_TD.split(SMALLEST), strict=True):
            stop = min(first + SMALLEST, rows.stop)
            inputs, factors = tile_TD.chunk(len(sums), -1), self.down.chunk(len(sums), -1)
            for sum_TF, x, a_RD in zip(sums, inputs, factors, strict=True):
                u_TR = wide_linear(x.contiguous(), a_RD).to(x.dtype)
                for b_Fr, row, rank, scale in self.ups:
                    y_TF = wide_linear(u_TR[:, rank : rank + b_Fr.shape[1]], b_Fr)[: stop - first]
                    sum_TF[first:stop, row : row + len(b_Fr)] += y_TF * scale


@dataclass(frozen=True, slots=True)
class AdaptedRange:
    """Rows of a tile with the product of their adapter beside each weight, by its name."""

    rows: slice
    products: dict[str, LowRankProduct]


def multiply(name: str, product: AnyProduct, x_TD: torch.Tensor, ranges: Iterable[AdaptedRange]) -> torch.Tensor:
    """Returns the product of rows with a weight and with their adapters beside it: [T, D] -> [T, F]."""
    adapted = list(_beside(name, ranges))
    if not adapted:
        return product(x_TD)
    sums = product.slice_sums(x_TD)
    for rows, low_rank in adapted:
        low_rank.add_to(sums, rows, x_TD)
    y_TF = tree_sum(sums)
    if x_TD.dtype == torch.float32:
        return y_TF
    plain_TF = product(x_TD)
    for rows, _ in adapted:
        plain_TF[rows] = y_TF[rows].to(x_TD.dtype)
    return plain_TF


def wide_product(product: AnyProduct, x_TD: torch.Tensor) -> torch.Tensor:
    """Returns the product with a weight as rows with an adapter have it without theirs: fp32 [T, F]."""
    return tree_sum(product.slice_sums(x_TD))


def _beside(name: str, ranges: Iterable[AdaptedRange]) -> Iterator[tuple[slice, LowRankProduct]]:
    for each in ranges:
        if name in each.products:
            yield each.rows, each.products[name]
