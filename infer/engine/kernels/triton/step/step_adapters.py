"""Rows of a step in tiles of one expert or one adapter, which kernels multiply by weights of their own.

An adapter's number is its slot plus one; rows without an adapter have the number 0. Letters: T tokens, P pairs of a
token and one of its experts, E experts, N numbers, C tiles.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from ......core.integers import ceil_div
from .step_columns import TILE

LINE: Final = 21  # numbers of 64 bits of an adapter beside a weight: 3, and 6 for each of up to 3 pairs of factors


class RowTiles(NamedTuple):
    """The expert of each tile, its first row, and the end of the expert's rows: int32."""

    expert: Any
    first: Any
    stop: Any


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step.

    Attributes:
        numbers: that of each token's adapter, int32 [T].
        tiles: all tokens in tiles of one adapter, whose number is in the place of the expert's.
    """

    numbers: torch.Tensor
    tiles: RowTiles

    @staticmethod
    def each(numbers_T: torch.Tensor) -> "StepAdapters":
        """Returns a tile for each row."""
        first_T = torch.arange(len(numbers_T), dtype=torch.int32, device=numbers_T.device)
        return StepAdapters(numbers_T, RowTiles(numbers_T, first_T, first_T + 1))


def expert_tiles(ends_E: torch.Tensor, size: int, count: int) -> RowTiles:
    """Cuts the rows of experts into tiles, without a wait for their numbers.

    Args:
        ends_E: the end of each expert's rows.
        size: the rows of a tile.
        count: the number of tiles, at least as many as there may be; those behind the last one are empty.
    """
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    stop_E = ((counts_E + size - 1) // size).cumsum(0)
    tile = torch.arange(count, device=ends_E.device)
    expert = torch.searchsorted(stop_E, tile, right=True).clamp_max(len(ends_E) - 1)
    before = torch.where(expert > 0, stop_E[(expert - 1).clamp_min(0)], 0)
    first = (ends_E - counts_E)[expert] + (tile - before) * size
    return RowTiles(expert.int(), first.int(), torch.where(tile < stop_E[-1], ends_E[expert], 0).int())


def pair_tiles(keys_P: torch.Tensor, num_keys: int) -> RowTiles:
    """Cuts pairs that are sorted by expert and adapter into tiles.

    Args:
        keys_P: the expert of each pair times N, plus the number of its adapter, ascending.
        num_keys: E N.
    """
    every = torch.arange(num_keys, device=keys_P.device)
    ends = torch.searchsorted(keys_P, every, right=True).int()
    return expert_tiles(ends, TILE, ceil_div(len(keys_P), TILE) + min(num_keys, len(keys_P)))
