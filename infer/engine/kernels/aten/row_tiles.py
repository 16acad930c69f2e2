"""The number of rows of the matrix products, chosen so that a row's bits do not depend on the rest of the batch.

A CPU's matrix product chooses its kernel, and with it the order of its sums, by the number of rows: fp32 differs below
16 rows or if threads share the inner dim, bf16 at several numbers that vary with the shape. So a step's rows are padded
and cut into tiles of a few fixed sizes. Before serving, each size is compared, bit for bit, with the smallest size on
the layers that will run; sizes that differ are not used on this machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .....parallel.collectives import all_gather
from .....parallel.mesh import Group

SMALLEST: Final = 16
CANDIDATES: Final = (SMALLEST, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_WASTE: Final = 1.5  # the largest ratio of a tile's size to the rows that are left

Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowTile:
    """Rows [first, stop), to be padded to `size`."""

    first: int
    stop: int
    size: int


def cut(num_rows: int, sizes: Sequence[int]) -> list[RowTile]:
    """Covers `num_rows` with few tiles of the given ascending sizes, without much padding."""
    tiles: list[RowTile] = []
    first = 0
    while first < num_rows:
        left = num_rows - first
        size = next((size for size in sizes if left <= size <= max(SMALLEST, MOST_WASTE * left)), 0)
        size = size or max(size for size in sizes if size <= left)
        tiles.append(RowTile(first, min(first + size, num_rows), size))
        first += size
    return tiles


def agreeing_sizes(
    layers: Sequence[tuple[Layer, int]], dtype: torch.dtype, device: torch.device, most: int, tp: Group
) -> tuple[int, ...]:
    """Returns the sizes at which every layer gives a row the same bits as in a tile of 16 rows; every rank calls it.

    Args:
        layers: functions of [rows, D], each with its D.
        dtype, device: those of the rows.
        most: the largest number of rows of a step.
        tp: the tensor-parallel group.
    """
    sizes = [size for size in CANDIDATES if size <= most] or [SMALLEST]
    generator = torch.Generator("cpu").manual_seed(0)
    agree = torch.ones(len(sizes), dtype=torch.int32, device=device)
    for layer, width in layers:
        x_ND = torch.randn(sizes[-1], width, generator=generator).to(device, dtype)
        whole = x_ND[: len(x_ND) // SMALLEST * SMALLEST]
        expected = torch.cat([layer(x_16D.contiguous()) for x_16D in whole.split(SMALLEST)])
        for i, size in enumerate(sizes):
            agree[i] &= torch.equal(layer(x_ND[:size].contiguous()), expected[:size])
    everywhere = torch.stack(all_gather(agree, tp)).amin(dim=0)
    return tuple(size for size, ok in zip(sizes, everywhere.tolist(), strict=True) if ok or size == SMALLEST)
