"""Rows in tiles of one adapter or expert: each row is in one of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.triton.step.step_adapters import RowTiles, StepAdapters, expert_tiles, pair_tiles
from tk.infer.engine.kernels.triton.step.step_columns import TILE, TILE_COLUMNS, adapter_columns
from tk.tests.infer.engine.kernels.triton.step.test_step_columns import PLAN

CHOSEN = torch.tensor([0, 0, 1, 3, 3, 3, 5], dtype=torch.int32)
EXPERTS = 6


def covered(tiles: RowTiles, size: int = TILE) -> list[tuple[int, int]]:
    """Returns the rows that tiles have, each with its expert or adapter."""
    found = zip(*(each.tolist() for each in tiles), strict=True)
    return sorted((row, key) for key, first, stop in found for row in range(first, min(first + size, stop)))


@pytest.mark.parametrize("size", [1, 2, 4, 64])
def test_tiles_cover_the_rows_of_each_expert_once(size: int) -> None:
    ends = torch.searchsorted(CHOSEN, torch.arange(EXPERTS), right=True).int()
    tiles = expert_tiles(ends, size, -(-len(CHOSEN) // size) + EXPERTS)
    assert covered(tiles, size) == list(enumerate(CHOSEN.tolist()))


def test_tiles_cover_pairs_by_expert_and_adapter() -> None:
    keys = torch.tensor([0, 0, 2, *[5] * 40, 17])
    assert covered(pair_tiles(keys, 18)) == list(enumerate(keys.tolist()))


def test_tiles_of_a_plan_have_rows_of_one_adapter() -> None:
    lengths, slots = (3, 40, 1, 2, 5), (-1, 1, 1, 0, -1)
    plan = replace(PLAN, span_length=np.array(lengths, np.int32), adapters=np.array(slots, np.int32))
    found = adapter_columns(plan)
    numbers = [slot + 1 for length, slot in zip(lengths, slots, strict=True) for _ in range(length)]
    assert found["numbers"].tolist() == numbers
    tiles = np.stack([found[name] for name in TILE_COLUMNS])
    assert tiles.dtype == np.int32
    assert covered(RowTiles(*tiles)) == list(enumerate(numbers))
    assert tiles.shape[1] == 1 + 3 + 1 + 1, "neighbours share tiles"


def test_a_plan_without_adapters_sends_nothing() -> None:
    assert adapter_columns(PLAN) == {}


def test_each_row_of_a_bucket_is_a_tile() -> None:
    assert covered(StepAdapters.each(torch.tensor([2, 0, 1])).tiles) == [(0, 2), (1, 0), (2, 1)]
