"""What adapters change of a tile's rows: products with factors beside those with weights, norms and heads of their own.

u = A x is rounded once to the dtype of x. scale B u joins the fp32 sum of W x, slice by slice, before that is rounded;
so does the change of a bias. Rows without an adapter keep the bits that they have in a step without adapters. Letters
as in `prepared_weights.py`, R the ranks of all adapters of one weight, r the rank of one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .....checkpoint.read.stored_array import StoredArray
from .....core.dtypes import DType
from .....parallel.collectives import tree_sum
from .....parallel.products import linear, wide_linear
from .....parallel.torch_dtypes import format_of
from ...program.adapters import RankAdapter, WeightAdapter
from ...program.lower import Program
from ...program.own_params import linear_biases
from .prepared_weights import AnyProduct, PreparedWeights
from .row_tiles import SMALLEST


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """The factors of one adapter beside one weight, or beside that of one expert.

    Attributes:
        down: A of all pairs, [R, D].
        ups: of each pair B [F, r], its first output, its first row of A and its scale.
    """

    down: torch.Tensor
    ups: tuple[tuple[torch.Tensor, int, int, float], ...]

    def add_to(self, sums: Sequence[torch.Tensor], rows: slice, x_TD: torch.Tensor) -> None:
        """Adds the products of some rows to the sums of slices, each fp32 [T, F]."""
        for place, tile_TD in _tiles(rows, x_TD):
            inputs, factors = tile_TD.chunk(len(sums), -1), self.down.chunk(len(sums), -1)
            for sum_TF, x, a_RD in zip(sums, inputs, factors, strict=True):
                u_TR = wide_linear(x.contiguous(), a_RD).to(x.dtype)
                for b_Fr, row, rank, scale in self.ups:
                    y_TF = wide_linear(u_TR[:, rank : rank + b_Fr.shape[1]], b_Fr)[: place.stop - place.start]
                    sum_TF[place, row : row + len(b_Fr)] += y_TF * scale


@dataclass(frozen=True, slots=True)
class LowRankProducts:
    """The factors of one adapter beside the weights of all experts, or beside one weight.

    Attributes:
        down: A of all pairs, [experts, R, D].
        ups: as those of `LowRankProduct`, each B [experts, F, r].
    """

    down: torch.Tensor
    ups: tuple[tuple[torch.Tensor, int, int, float], ...]

    @staticmethod
    def of(adapter: WeightAdapter, dtype: DType, device: torch.device) -> "LowRankProducts":
        """Copies the factors of an adapter, of that dtype, to a device."""
        down, *ups = (
            StoredArray(each, dtype).torch().to(device).unflatten(0, (adapter.num_experts, -1))
            for each in (adapter.down, *(up.values for up in adapter.ups))
        )
        places = [(each.first_row, each.first_rank, each.scale) for each in adapter.ups]
        return LowRankProducts(down, tuple((up, *place) for up, place in zip(ups, places, strict=True)))

    def __getitem__(self, expert: int | torch.Tensor) -> LowRankProduct:
        """Returns the factors of an expert; its number may be an int64 [1] on the device, for which nothing waits."""

        def own(each: torch.Tensor) -> torch.Tensor:
            return each[expert] if isinstance(expert, int) else each.index_select(0, expert)[0]

        ups = tuple((own(up), first, rank, scale) for up, first, rank, scale in self.ups)
        return LowRankProduct(own(self.down), ups)


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter of a rank on its device.

    Attributes:
        products: the factors, by the names of weights.
        changes: what it adds to biases, fp32, by the names of weights.
        own: the parameters that it has in place of the base's, by name.
    """

    products: Mapping[str, LowRankProducts]
    changes: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]

    @staticmethod
    def of(adapter: RankAdapter, program: Program, weights: PreparedWeights) -> "PreparedAdapter":
        """Copies an adapter to the device of the base's weights, whose dtype it has."""
        dtype, device = format_of(weights.dtype), weights.device
        own = {name: StoredArray(values, dtype).torch().to(device) for name, values in adapter.own.items()}
        return PreparedAdapter(
            {name: LowRankProducts.of(each, dtype, device) for name, each in adapter.beside.items()},
            {
                weight: own[bias].float() - weights[bias].float()
                for weight, bias in linear_biases(program).items()
                if bias in own
            },
            own,
        )


@dataclass(frozen=True, slots=True)
class AdaptedRange:
    """Rows of a tile and their adapter."""

    rows: slice
    adapter: PreparedAdapter


def multiply(name: str, product: AnyProduct, x_TD: torch.Tensor, ranges: Iterable[AdaptedRange]) -> torch.Tensor:
    """Returns the product of rows with a weight and with their adapters beside it: [T, D] -> [T, F]."""
    adapted = [each for each in ranges if name in each.adapter.products or name in each.adapter.changes]
    if not adapted:
        return product(x_TD)
    sums = product.slice_sums(x_TD)
    for each in adapted:
        if name in each.adapter.products:
            each.adapter.products[name][0].add_to(sums, each.rows, x_TD)
        if name in each.adapter.changes:
            sums[0][each.rows] += each.adapter.changes[name]
    y_TF = tree_sum(sums)
    if x_TD.dtype == torch.float32:
        return y_TF
    plain_TF = product(x_TD)
    for each in adapted:
        plain_TF[each.rows] = y_TF[each.rows].to(x_TD.dtype)
    return plain_TF


def add_of_expert(
    name: str,
    expert: int | torch.Tensor,
    products: Sequence[torch.Tensor],
    x_TD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ranges: Iterable[AdaptedRange],
) -> None:
    """Replaces, in products of an expert's rows with its weight, those of rows that have an adapter of the expert.

    Args:
        name: the weight of all experts.
        expert: the expert's number, or an int64 [1] on the device.
        products: the product of each slice, [T, F], which changes in place.
        x_TD: the rows.
        weights: the slices of the expert's weight, each [F, D / slices].
        ranges: the rows with adapters.
    """
    for each in ranges:
        if name in each.adapter.products:
            for place, tile_TD in _tiles(each.rows, x_TD):
                pairs = zip(tile_TD.chunk(len(weights), -1), weights, strict=True)
                sums = [wide_linear(x.contiguous(), weight) for x, weight in pairs]
                whole = slice(0, len(tile_TD))
                each.adapter.products[name][expert].add_to(sums, whole, tile_TD)
                for product, sum_TF in zip(products, sums, strict=True):
                    product[place] = sum_TF[: place.stop - place.start].to(product.dtype)


def by_own(
    names: Sequence[str],
    weights: PreparedWeights,
    ranges: Iterable[AdaptedRange],
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Computes all rows of a tile with parameters of the base, and those of adapters that have some with these.

    Args:
        names: the parameters.
        compute: a function of the parameters, which returns the rows. It computes all of them each time: then the bits
            of a row depend on the tile's size alone.
    """
    found = compute(*(weights[name] for name in names))
    for each in ranges:
        own = each.adapter.own
        if any(name in own for name in names):
            parameters = (own[name] if name in own else weights[name] for name in names)
            found[each.rows] = compute(*parameters)[each.rows]
    return found


def multiply_by_own_heads(
    name: str, logits_RV: torch.Tensor, normed_RD: torch.Tensor, ranges: Iterable[AdaptedRange]
) -> None:
    """Replaces the logits of rows whose adapter has a head of its own, in place."""
    for each in ranges:
        if name in each.adapter.own:
            for place, tile_TD in _tiles(each.rows, normed_RD):
                logits_RV[place] = linear(tile_TD, each.adapter.own[name])[: place.stop - place.start]


def wide_product(product: AnyProduct, x_TD: torch.Tensor) -> torch.Tensor:
    """Returns the product with a weight as rows with an adapter have it without theirs: fp32 [T, F]."""
    return tree_sum(product.slice_sums(x_TD))


def _tiles(rows: slice, x_TD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields some rows in tiles of a fixed size, padded, so that a row's bits do not depend on the others."""
    padded_TD = F.pad(x_TD[rows], (0, 0, 0, -(rows.stop - rows.start) % SMALLEST))
    for first, tile_TD in zip(range(rows.start, rows.stop, SMALLEST), padded_TD.split(SMALLEST), strict=True):
        yield slice(first, min(first + SMALLEST, rows.stop)), tile_TD
