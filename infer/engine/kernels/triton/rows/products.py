"""Kernels of products with weights in codes, and with those of experts, in codes or not.

A weight is read as groups of columns. If it is in codes, a group has one scale, in 4 bits and a minimum. Sums are fp32.
Few rows are multiplied one by one, others in tiles.

Letters: N out features of a block, G groups, C padded columns or bytes of a group, M rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The constants of a product.

    Attributes:
        rows: the out features, of an expert or of a gate if there are several.
        columns: the in features.
        num_groups: the groups of a row of the weight.
        bits: the bits of a code; 0 without codes.
        group, stored: the columns of a group, and its bytes if these are codes, else its columns.
        padded: the next power of two of `stored`.
        block, groups: the out features and the groups of a step of a program.
        tile: the rows of a tile.
        is_gated: whether the out features of gate are followed by those of up, and silu(gate) * up is written.
        is_wide: whether operands of products are fp32.
    """

    rows: int
    columns: int
    num_groups: int
    bits: int
    group: int
    stored: int
    padded: int
    block: int
    groups: int
    tile: int = 1
    is_gated: bool = False
    is_wide: bool = False

    @property
    def width(self) -> int:
        """The columns of a padded group."""
        return 2 * self.padded if self.bits == 4 else self.padded


class StoredWeight(NamedTuple):
    """The tensors of a weight: numbers [N, K], or codes with scales and minima [N, G]; None for what there is not."""

    numbers: Any
    scales: Any = None
    minima: Any = None


@triton.jit
def _stored(weight: tl.tensor, rows: tl.tensor, groups: tl.tensor, valid: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Returns the stored numbers of rows and groups, [N, G, C], with their scales and minima, [N, G]."""
    place = tl.arange(0, S.padded)
    line = rows[:, None].to(tl.int64) * S.num_groups + groups[None, :]
    scales = tl.full(valid.shape, 1.0, tl.float32)
    minima = tl.full(valid.shape, 0.0, tl.float32)
    if S.bits == 0:
        column = groups[None, :, None] * S.stored + place[None, None, :]
        at = rows[:, None, None].to(tl.int64) * S.columns + column
        inside = valid[:, :, None] & (column < S.columns)
    else:
        at = line[:, :, None] * S.stored + place[None, None, :]
        inside = valid[:, :, None] & (place < S.stored)[None, None, :]
        scales = tl.load(weight.scales + line, mask=valid, other=0.0).to(tl.float32)
    if S.bits == 4:
        minima = tl.load(weight.minima + line, mask=valid, other=0.0).to(tl.float32)
    return tl.load(weight.numbers + at, mask=inside, other=0), scales, minima


@triton.jit
def _row_sums(x: tl.tensor, weight: tl.tensor, rows: tl.tensor, inside: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Returns the products of one row x with rows of a weight, fp32 [N]."""
    place = tl.arange(0, S.padded)[None, :]
    total = tl.full((S.block,), 0.0, tl.float32)
    for first in range(0, S.num_groups, S.groups):
        groups = first + tl.arange(0, S.groups)
        is_group = groups < S.num_groups
        numbers, scales, minima = _stored(weight, rows, groups, inside[:, None] & is_group[None, :], S)
        start = groups[:, None] * S.group
        if S.bits == 4:
            low_in = is_group[:, None] & (2 * place < S.group)
            high_in = is_group[:, None] & (2 * place + 1 < S.group)
            low = tl.load(x + start + 2 * place, mask=low_in, other=0.0).to(tl.float32)
            high = tl.load(x + start + 2 * place + 1, mask=high_in, other=0.0).to(tl.float32)
            both = (numbers & 15).to(tl.float32) * low[None] + (numbers >> 4).to(tl.float32) * high[None]
            part = tl.sum(both, axis=2) * scales + minima * tl.sum(low + high, axis=1)[None, :]
        else:
            at = start + place
            values = tl.load(x + at, mask=(place < S.group) & (at < S.columns), other=0.0).to(tl.float32)
            wide = numbers.to(tl.float32)
            if S.bits == 8:
                wide = wide - 128.0
            part = tl.sum(wide * values[None], axis=2) * scales
        total += tl.sum(part, axis=1)
    return total


@triton.jit
def row_product_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, experts: tl.tensor, out: tl.tensor, S: tl.constexpr
) -> None:
    """Multiplies one row by a block of out features; programs: (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * S.block + tl.arange(0, S.block)
    inside = places < S.rows
    kind = out.dtype.element_ty
    rows = places
    if experts is not None:
        rows = tl.load(experts + row) * S.rows + places
    total = _row_sums(x + row * S.columns, weight, rows, inside, S)
    if bias is not None:
        total += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    if S.is_gated:
        up = _row_sums(x + row * S.columns, weight, rows + S.rows, inside, S)
        total = total.to(kind).to(tl.float32)
        total = (total / (1.0 + tl.exp(-total))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    tl.store(out + row * S.rows + places, total.to(kind), mask=inside)


@triton.jit
def _tile_sums(
    x: tl.tensor, weight: tl.tensor, rows: tl.tensor, inside: tl.tensor, lines: tl.tensor, real: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns the products of rows x with rows of a weight, fp32 [M, N]; widened values have the dtype of x."""
    kind = tl.float32 if S.is_wide else x.dtype.element_ty
    narrow = x.dtype.element_ty
    slot = tl.arange(0, S.groups * S.width)
    place = slot % S.width
    total = tl.full((S.tile, S.block), 0.0, tl.float32)
    for first in range(0, S.num_groups, S.groups):
        groups = first + tl.arange(0, S.groups)
        valid = inside[:, None] & (groups < S.num_groups)[None, :]
        numbers, scales, minima = _stored(weight, rows, groups, valid, S)
        if S.bits == 4:
            numbers = tl.reshape(tl.join(numbers & 15, numbers >> 4), (S.block, S.groups, S.width))
            numbers = (numbers.to(tl.float32) * scales[:, :, None] + minima[:, :, None]).to(narrow)
        elif S.bits == 8:
            numbers = ((numbers.to(tl.float32) - 128.0) * scales[:, :, None]).to(narrow)
        group = first + slot // S.width
        at = group * S.group + place
        has = real[:, None] & ((group < S.num_groups) & (place < S.group) & (at < S.columns))[None, :]
        values = tl.load(lines + at[None, :], mask=has, other=0.0).to(kind)
        wide = tl.trans(tl.reshape(numbers, (S.block, S.groups * S.width)).to(kind))
        total = tl.dot(values, wide, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_x"])
def tile_product_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, tiles: tl.tensor, out: tl.tensor, num_x: tl.tensor,
    S: tl.constexpr,
) -> None:  # fmt: skip
    """Multiplies a tile of rows by a block of out features; programs: (tile * blocks + block,).

    They have one dimension, as a GPU has at most 65,535 programs in another one.
    """
    blocks: tl.constexpr = (S.rows + S.block - 1) // S.block
    tile = tl.program_id(0) // blocks
    first, stop, expert = tile * S.tile, num_x, 0
    if tiles is not None:
        first, stop, expert = tl.load(tiles.first + tile), tl.load(tiles.stop + tile), tl.load(tiles.expert + tile)
    if first < stop:
        at = first + tl.arange(0, S.tile)
        real = at < stop
        places = tl.program_id(0) % blocks * S.block + tl.arange(0, S.block)
        inside = places < S.rows
        lines = x + at[:, None].to(tl.int64) * S.columns
        total = _tile_sums(x, weight, expert * S.rows + places, inside, lines, real, S)
        if bias is not None:
            total += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)[None, :]
        address = at[:, None].to(tl.int64) * S.rows + places[None, :]
        tl.store(out + address, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
