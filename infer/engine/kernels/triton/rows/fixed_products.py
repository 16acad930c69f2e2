"""The kernel of products with weights in floats whose rows have the same bits in any company: `--batch-invariant`.

An element is one chain of sums over the columns, in order: nothing is split along them, and no library chooses by the
number of rows. Few rows and many have tiles of two sizes, which differ in which elements they compute together. Both
are so small that they take the same instruction on a GPU, with the same number of columns: a larger tile would take
wgmma or tcgen05 where there are such. The gate reads that in the code that it compiles.

Letters: M rows, N out features, K columns.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from ......core.integers import ceil_div
from ......parallel.collectives import tree_sum
from ...aten.prepared_weights import PreparedProduct
from .interpreted import is_interpreted

_FEW: Final = 16  # rows, of which one tile has room


@dataclass(frozen=True, slots=True)
class FixedTile:
    """The tile of a program, and how it is computed.

    Attributes:
        rows, block: its rows and out features.
        step: the columns that are read at once.
        stages: see Triton.
    """

    rows: int
    block: int
    step: int
    stages: int


_FEW_TILE: Final = FixedTile(16, 32, 64, 6)
_MANY_TILE: Final = FixedTile(32, 128, 64, 4)
_WIDE_TILE: Final = FixedTile(16, 32, 32, 3)  # of fp32, whose products take no tensor cores


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The constants of a product.

    Attributes:
        rows, columns: the out features and the columns of the weight.
        row_stride, column_stride: the distance in memory between two of each.
        tile: the elements of a program.
        is_wide: whether operands are fp32.
    """

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    tile: FixedTile
    is_wide: bool


@triton.jit(do_not_specialize=["num_x"])
def fixed_product_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_x: tl.tensor, S: tl.constexpr
) -> None:
    """Multiplies a tile of rows by a block of out features; programs: (tile, block)."""
    kind = tl.float32 if S.is_wide else x.dtype.element_ty
    at = (tl.program_id(0) * S.tile.rows + tl.arange(0, S.tile.rows)).to(tl.int64)
    places = (tl.program_id(1) * S.tile.block + tl.arange(0, S.tile.block)).to(tl.int64)
    real, inside = at < num_x, places < S.rows
    total = tl.full((S.tile.rows, S.tile.block), 0.0, tl.float32)
    for first in range(0, S.columns, S.tile.step):
        columns = (first + tl.arange(0, S.tile.step)).to(tl.int64)  # times the stride of a transposed weight
        has = columns < S.columns
        values = tl.load(x + at[:, None] * S.columns + columns[None, :], mask=real[:, None] & has[None, :], other=0.0)
        numbers = weight + places[None, :] * S.row_stride + columns[:, None] * S.column_stride
        wide = tl.load(numbers, mask=inside[None, :] & has[:, None], other=0.0)
        total = tl.dot(values.to(kind), wide.to(kind), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    address = at[:, None] * S.rows + places[None, :]
    tl.store(out + address, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def fixed_product(x_MK: torch.Tensor, product: PreparedProduct, rounds: bool = True) -> torch.Tensor:
    """Returns a product whose rows have the same bits in any company: [M, K] -> [M, N].

    It has the product's dtype, or fp32 if it does not round: that of one slice has the same bits if it is rounded then.
    A transposed weight is read as it is, block by block. Slices of the columns are summed apart, and added in a tree.
    """
    x_MK, bias_N = x_MK.to(product.dtype), product.bias
    if len(product.slices) == 1:
        return _with_blocks(x_MK, product.slices[0], product.num_transposed, bias_N, rounds)
    inputs = x_MK.chunk(len(product.slices), dim=-1)
    parts = zip(inputs, product.slices, strict=True)
    return tree_sum([_with_blocks(x, weight, product.num_transposed, None, rounds) for x, weight in parts])


def _with_blocks(
    x_MK: torch.Tensor, weight: torch.Tensor, num_transposed: int, bias_N: torch.Tensor | None, rounds: bool
) -> torch.Tensor:
    if not num_transposed:
        return multiply_fixed(x_MK, weight, bias_N, rounds)
    blocks = weight.chunk(num_transposed)
    biases = [None] * num_transposed if bias_N is None else bias_N.chunk(num_transposed)
    parts = [multiply_fixed(x_MK, block.t(), bias, rounds) for block, bias in zip(blocks, biases, strict=True)]
    return parts[0] if num_transposed == 1 else torch.cat(parts, dim=-1)


def multiply_fixed(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, rounds: bool = True
) -> torch.Tensor:
    """Returns x W^T plus the bias, of a weight with any strides: [M, K] -> [M, N], in one order of sums."""
    (rows, columns), num_x = weight_NK.shape, len(x_MK)
    is_wide = x_MK.dtype == torch.float32 or is_interpreted()  # the interpreter multiplies bf16 wrongly
    tile = _WIDE_TILE if is_wide else _FEW_TILE if num_x <= _FEW else _MANY_TILE
    out_MN = x_MK.new_empty(num_x, rows, dtype=x_MK.dtype if rounds else torch.float32)
    fixed_product_kernel[(ceil_div(num_x, tile.rows), ceil_div(rows, tile.block))](
        x_MK.contiguous(),
        weight_NK,
        bias_N,
        out_MN,
        num_x,
        FixedShape(rows, columns, weight_NK.stride(0), weight_NK.stride(1), tile, is_wide),
        num_stages=tile.stages,
    )
    return out_MN
