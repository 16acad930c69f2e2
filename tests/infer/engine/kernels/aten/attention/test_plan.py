"""The plan of attention: the tiles of each query, those that a window leaves out, and groups of bounded size."""

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.aten.attention import plan
from tk.infer.engine.kernels.aten.attention.plan import AttentionPlanner, WindowPlan
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.step_tensors import StepTensors
from tk.infer.engine.options import ATTENTION_TILE
from tk.infer.engine.step.running_plan import TokenSpan

BLOCK = 64
# token 0 at position 9, tokens 1..40 at 280..319, token 41 at position 600
SPANS = [
    TokenSpan(0, 9, 10, np.array([7], np.int32)),
    TokenSpan(1, 280, 320, np.arange(10, 15, dtype=np.int32)),
    TokenSpan(41, 600, 601, np.arange(20, 30, dtype=np.int32)),
]


def planned(window: int | None) -> WindowPlan:
    numbers = StepTensors(torch.device("cpu"))
    made = AttentionPlanner(KVCache(1, 40, 2, BLOCK, 8, "fp32"), SPANS, 4, numbers).plan(window)
    numbers.send()
    return made


def test_decoding_sequences_come_longest_first_with_the_blocks_of_their_tiles() -> None:
    found = planned(None)
    assert found.decoding is not None
    assert found.decoding.tensor.tolist() == [41, 0]
    (group,) = found.groups
    assert group.counts == (2, 1, 1)
    assert group.tile.tensor.tolist() == [0, 0, 1, 2]
    assert group.sequence.tensor.tolist() == [0, 1, 0, 0]
    assert group.query.tensor.tolist() == [600, 9, 600 - ATTENTION_TILE, 600 - 2 * ATTENTION_TILE]
    assert group.blocks.tensor.tolist() == [[20, 21, 22, 23], [7, 0, 0, 0], [24, 25, 26, 27], [28, 29, 0, 0]]


def test_a_window_leaves_out_the_tiles_before_it() -> None:
    """Those of the shortest sequence count, and those of a span's first query."""
    found = planned(20)
    assert found.groups[0].tile.tensor.tolist() == [0, 0, 1, 2]
    assert [each.first_tile for each in found.prefills] == [1]
    assert [each.first_tile for each in planned(30).prefills] == [0]


def test_a_prefill_knows_the_query_tiles_that_see_nothing_of_a_tile_of_keys() -> None:
    (span,) = planned(None).prefills
    assert (span.first, span.start, span.length) == (1, 280, 40)
    assert span.tiles.tensor.tolist() == [[10, 11, 12, 13], [14, 0, 0, 0]]
    assert span.unseeing == (0, 0)


def test_groups_are_cut_where_they_would_read_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_READ", 2 * ATTENTION_TILE * 2 * 8)  # two tiles at a time
    assert [each.counts for each in planned(None).groups] == [(2,), (1, 1)]
