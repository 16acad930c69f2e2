"""Who reads which block: each once, dealt out in rounds that fit the ranks' areas."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.read import read_plan
from tk.checkpoint.read.read_plan import ReadPlanner, ReadRequest, Span, from_rows, to_rows
from tk.core.geometry import Box

NORM = "model.norm.weight"  # 32 elements of 4 bytes
UP = "model.layers.0.mlp.up_proj.weight"  # 48 x 32, cut in rows over tp 2, runs over dp 2


@pytest.fixture
def planner(good: Path) -> ReadPlanner:
    return ReadPlanner(Checkpoint.open(good))


def rows(low: int, high: int) -> ReadRequest:
    return ReadRequest(UP, Box.from_bounds([[low, high], [0, 32]]))


def test_a_want_takes_the_whole_blocks_that_it_touches(planner: ReadPlanner) -> None:
    chunks = planner.checkpoint.chunks[UP, "weight"]
    assert planner.spans(rows(0, 0)) == ()
    (span,) = planner.spans(rows(0, 1))
    assert (span.chunk, span.low, span.high) == (0, 0, chunks[0].stop), "its one block, so that it can be checked"
    assert [span.chunk for span in planner.spans(rows(0, 48))] == list(range(len(chunks)))


def test_two_ranks_needs_are_read_once(planner: ReadPlanner) -> None:
    needs = [planner.spans(rows(0, 30)), planner.spans(rows(20, 48))]
    union = planner.union(needs)
    assert len(union) == len(set(map(planner.block, union)))
    assert set(map(planner.block, union)) == {planner.block(span) for spans in needs for span in spans}
    assert planner.is_worth_sharing(needs)
    assert not planner.is_worth_sharing([planner.spans(rows(0, 48)), ()])


def test_rounds_fill_each_ranks_area_once(planner: ReadPlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [Span(NORM, "weight", 0, low, low + 8) for low in (0, 8, 16, 24)]  # of 32 bytes each
    monkeypatch.setattr(read_plan, "AREA", 128)
    dealt = planner.assign_rounds(spans, 1)
    assert [[(read.rank, read.at) for read in reads] for reads in dealt] == [[(0, 0), (0, 64)], [(0, 0), (0, 64)]]
    assert [read.span for reads in dealt for read in reads] == spans
    (only,) = planner.assign_rounds(spans, 2)
    assert [(read.rank, read.at) for read in only] == [(0, 0), (0, 64), (1, 0), (1, 64)]


def test_spans_survive_the_way_to_another_rank(planner: ReadPlanner) -> None:
    spans = list(planner.spans(rows(0, 48)))
    assert from_rows(to_rows(spans)) == spans
