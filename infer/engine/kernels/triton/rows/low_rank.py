"""Kernels of low-rank adapters: u = A x of each row's adapter, rounded, and scale B u, which joins the sum of W x.

The device has a table of addresses (see `run/device_adapters.py`), so adapters of any rank come and go while graphs
keep the table's own address. A tile has rows of one adapter, or of one adapter and one expert.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from ......core.integers import ceil_div
from ..step.step_adapters import LINE, RowTiles
from ..step.step_columns import TILE
from .interpreted import is_interpreted

_PAIRS: Final = 3
_RANKS: Final = 16  # that are multiplied at once
_IN: Final = 64  # columns of x that are read at once
_OUT: Final = 128  # out features of a program


@dataclass(frozen=True, slots=True)
class LowRankShape:
    """The constants of the kernels.

    Attributes:
        columns: the in features of A, or the out features of B.
        ranks: the columns of u.
        numbers: one more than the slots of adapters.
        line, pairs: the numbers of a line of the table, and the most pairs of factors that it has.
        tile, block, step: the rows of a tile, the columns of results of a program, and those that it reads at once.
        is_wide: whether operands of products are fp32.
    """

    columns: int
    ranks: int
    numbers: int
    line: int
    pairs: int
    tile: int
    block: int
    step: int
    is_wide: bool


@triton.jit
def shrink_kernel(x: tl.tensor, table: tl.tensor, tiles: tl.tensor, out: tl.tensor, S: tl.constexpr) -> None:
    """Multiplies a tile of rows by some rows of A, and rounds; programs: (tile * blocks + block of ranks,)."""
    blocks: tl.constexpr = (S.ranks + S.block - 1) // S.block
    tile = tl.program_id(0) // blocks
    first, stop, key = tl.load(tiles.first + tile), tl.load(tiles.stop + tile), tl.load(tiles.expert + tile)
    line = table + key % S.numbers * S.line
    ranks = tl.load(line + 2).to(tl.int32)
    begin = tl.program_id(0) % blocks * S.block
    if (first < stop) & (begin < ranks):
        kind = out.dtype.element_ty
        wide = tl.float32 if S.is_wide else kind
        at = first + tl.arange(0, S.tile)
        real = at < stop
        rank = begin + tl.arange(0, S.block)
        down = tl.load(line + 1).to(tl.pointer_type(kind)) + (key // S.numbers).to(tl.int64) * ranks * S.columns
        total = tl.full((S.tile, S.block), 0.0, tl.float32)
        for start in range(0, S.columns, S.step):
            column = start + tl.arange(0, S.step)
            inside = (column < S.columns)[None, :]
            values = tl.load(x + at[:, None].to(tl.int64) * S.columns + column, mask=real[:, None] & inside, other=0.0)
            numbers = tl.load(
                down + rank[:, None] * S.columns + column, mask=(rank < ranks)[:, None] & inside, other=0.0
            )
            total = tl.dot(values.to(wide), tl.trans(numbers.to(wide)), total, input_precision="ieee")
        to = at[:, None].to(tl.int64) * S.ranks + rank[None, :]
        tl.store(out + to, total.to(kind), mask=real[:, None] & (rank < ranks)[None, :])


@triton.jit
def expand_kernel(
    sums: tl.tensor, u: tl.tensor, table: tl.tensor, tiles: tl.tensor, out: tl.tensor, S: tl.constexpr
) -> None:
    """Adds B u and changes of a bias to sums of a tile of rows, and rounds.

    Programs: (tile * blocks + block of features,), in one dimension, as those of `tile_product_kernel`.
    """
    blocks: tl.constexpr = (S.columns + S.block - 1) // S.block
    tile = tl.program_id(0) // blocks
    first, stop, key = tl.load(tiles.first + tile), tl.load(tiles.stop + tile), tl.load(tiles.expert + tile)
    if first < stop:
        line = table + key % S.numbers * S.line
        kind = u.dtype.element_ty
        wide = tl.float32 if S.is_wide else kind
        at = (first + tl.arange(0, S.tile)).to(tl.int64)
        real = (at < stop)[:, None]
        place = tl.program_id(0) % blocks * S.block + tl.arange(0, S.block)
        address = at[:, None] * S.columns + place[None, :]
        mask = real & (place < S.columns)[None, :]
        total = tl.load(sums + address, mask=mask, other=0.0)
        change = tl.load(line)
        if change != 0:
            change_at = change.to(tl.pointer_type(tl.float32)) + place
            total += tl.load(change_at, mask=place < S.columns, other=0.0)[None, :]
        for pair in range(S.pairs):
            own = line + 3 + 6 * pair
            rank = tl.load(own + 4).to(tl.int32)
            if rank > 0:
                rows = tl.load(own + 2).to(tl.int32)
                row = place - tl.load(own + 1).to(tl.int32)
                has = ((row >= 0) & (row < rows))[:, None]
                up = tl.load(own).to(tl.pointer_type(kind)) + (key // S.numbers).to(tl.int64) * rows * rank
                from_u = u + at[:, None] * S.ranks + tl.load(own + 3)
                product = tl.full((S.tile, S.block), 0.0, tl.float32)
                for start in range(0, rank, S.step):
                    column = start + tl.arange(0, S.step)
                    inside = (column < rank)[None, :]
                    values = tl.load(from_u + column[None, :], mask=real & inside, other=0.0).to(wide)
                    numbers = tl.load(up + row[:, None] * rank + column[None, :], mask=has & inside, other=0.0)
                    product = tl.dot(values, tl.trans(numbers.to(wide)), product, input_precision="ieee")
                total += product * tl.load(own + 5).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(out + address, total.to(out.dtype.element_ty), mask=mask)


def add_adapters(
    x_TD: torch.Tensor, sums_TF: torch.Tensor, lines: torch.Tensor, ranks: int, tiles: RowTiles
) -> torch.Tensor:
    """Returns the sums with the products of each row's adapter, in the dtype of the rows: [T, F].

    Args:
        x_TD: the rows.
        sums_TF: their products with the weight, fp32, contiguous.
        lines: the weight's lines of the table, int64 [numbers, LINE].
        ranks: the most rows of A, a multiple of 16.
        tiles: all rows in tiles of one adapter, and of one expert if there are some.
    """
    is_wide = x_TD.dtype == torch.float32 or is_interpreted()  # the interpreter multiplies bf16 wrongly
    (num_rows, hidden), features, count = x_TD.shape, sums_TF.shape[1], len(tiles.first)
    u_TR = x_TD.new_empty(num_rows, ranks)
    out_TF = x_TD.new_empty(num_rows, features)

    def shape(columns: int, block: int, step: int) -> Any:
        return LowRankShape(columns, ranks, len(lines), LINE, _PAIRS, TILE, block, step, is_wide)

    down, up = shape(hidden, _RANKS, _IN), shape(features, _OUT, _RANKS)
    shrink_kernel[(count * ceil_div(ranks, _RANKS),)](x_TD.contiguous(), lines, tiles, u_TR, down)
    expand_kernel[(count * ceil_div(features, _OUT),)](sums_TF, u_TR, lines, tiles, out_TF, up)
    return out_TF
