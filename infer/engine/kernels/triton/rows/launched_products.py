"""The launches of products: their blocks, and the tiles of experts, whose rows only the device counts."""

from dataclasses import replace
from typing import Final

import torch
import triton

from ......core.integers import ceil_div
from ......parallel.coded_weight import CodedWeight
from ...aten.expert_products import ExpertRows
from ..step.device_tables import ExpertPairs
from ..step.step_adapters import expert_tiles
from .interpreted import is_interpreted
from .products import ProductShape, StoredWeight, row_product_kernel, tile_product_kernel

FEW_ROWS: Final = 2  # are multiplied one by one: each reads the weight, the second one from the device's own cache
_DENSE: Final = 128  # columns of a weight that is not in codes, which are read at once
_ROW_BLOCK: Final = 16  # out features of a program for one row
_ROW_BYTES: Final = 512  # of codes of an out feature that are read at once
_TILE_BLOCKS: Final = {0: 64, 8: 64, 4: 32}  # out features of a tile, by bits: two halves of a byte take registers
_TILE_COLUMNS: Final = 64  # columns of a tile
_TILES: Final = (16, 32, 64)


def multiply_rows(
    x_MK: torch.Tensor,
    weight: ExpertRows,
    bias_N: torch.Tensor | None = None,
    pairs: ExpertPairs | None = None,
    is_gated: bool = False,
    rounds: bool = True,
) -> torch.Tensor:
    """Multiplies each row by a weight, or by that of its expert: [M, K] -> [M, N], or [M, N / 2] if it is gated.

    Results have the dtype of the rows, or fp32 if it does not round.
    """
    parts = (1 if pairs is None else len(pairs.ends)) * (2 if is_gated else 1)
    shape = _shape(weight, parts, _ROW_BLOCK, _ROW_BYTES)
    out_MN = x_MK.new_empty(len(x_MK), shape.rows, dtype=x_MK.dtype if rounds else torch.float32)
    row_product_kernel[(len(x_MK), ceil_div(shape.rows, _ROW_BLOCK))](
        x_MK.contiguous(),
        _tensors(weight),
        bias_N,
        None if pairs is None else pairs.experts,
        out_MN,
        replace(shape, is_gated=is_gated),
    )
    return out_MN


def multiply_tiles(
    x_MK: torch.Tensor,
    weight: ExpertRows,
    bias_N: torch.Tensor | None = None,
    pairs: ExpertPairs | None = None,
    size: int = 0,
    rounds: bool = True,
) -> torch.Tensor:
    """Multiplies rows in tiles by a weight, or by those of their experts: [M, K] -> [M, N].

    Args:
        x_MK: the rows.
        weight: the weight, or those of all experts, one below the other.
        bias_N: the bias; None without.
        pairs: the experts of the rows; None without.
        size: the rows of a tile; 0: as suits their number.
        rounds: whether results have the dtype of the rows, else fp32.
    """
    num_experts = 1 if pairs is None else len(pairs.ends)
    block = _TILE_BLOCKS[weight.grouping.bits if isinstance(weight, CodedWeight) else 0]
    shape = _shape(weight, num_experts, block, _TILE_COLUMNS)
    size = size or tile_rows(len(x_MK), num_experts)
    out_MN = x_MK.new_empty(len(x_MK), shape.rows, dtype=x_MK.dtype if rounds else torch.float32)
    tiles, count = None, ceil_div(len(x_MK), size)
    if pairs is not None:
        count += min(num_experts, len(x_MK))
        tiles = expert_tiles(pairs.ends, size, count)
    is_wide = x_MK.dtype == torch.float32 or is_interpreted()  # the interpreter multiplies bf16 wrongly
    tile_product_kernel[(count * ceil_div(shape.rows, block),)](
        x_MK.contiguous(),
        _tensors(weight),
        bias_N,
        tiles,
        out_MN,
        len(x_MK),
        replace(shape, tile=size, is_wide=is_wide),
    )
    return out_MN


def tile_rows(rows: int, num_experts: int) -> int:
    """Returns the rows of a tile: the smallest that holds an expert's share of them, or the largest."""
    share = ceil_div(rows, num_experts)
    return next((size for size in _TILES if size >= share), _TILES[-1])


def _tensors(weight: ExpertRows) -> StoredWeight:
    if isinstance(weight, CodedWeight):
        return StoredWeight(weight.codes, weight.scales, weight.minima)
    return StoredWeight(weight)


def _shape(weight: ExpertRows, parts: int, block: int, at_once: int) -> ProductShape:
    """Returns the shape of a product.

    Args:
        weight: what rows are multiplied by.
        parts: the number of equal parts of its rows.
        block: the out features of a program.
        at_once: the bytes of codes, or the columns, that it reads at once.
    """
    rows, columns = weight.shape
    bits, group, stored = 0, _DENSE, _DENSE
    if isinstance(weight, CodedWeight):
        bits, group, stored = weight.grouping.bits, weight.grouping.columns, weight.codes.shape[-1]
    padded = int(triton.next_power_of_2(stored))
    num_groups, groups = ceil_div(columns, group), max(1, at_once // padded)
    return ProductShape(rows // parts, columns, num_groups, bits, group, stored, padded, block, groups)
