"""Running plans: they advance in place, and their spans are cut to a range of tokens."""

import numpy as np
import pytest

from tk.infer.engine.step.running_plan import RunningPlan, spans_within
from tk.tests.infer.sampling_row import SamplingRow, pack


def plan() -> RunningPlan:
    """Returns a plan of three spans: 3 tokens at the start, one token after 9, and 2 tokens after 4."""
    return RunningPlan(
        tokens=np.arange(6, dtype=np.int32),
        positions=np.array([0, 1, 2, 9, 4, 5], np.int32),
        slots=np.array([16, 17, 18, 41, 52, 53], np.int32),
        span_length=np.array([3, 1, 2], np.int32),
        block_tables=np.array([[1, 0], [2, 5], [3, 0]], np.int32),
        rows=pack([SamplingRow(2), SamplingRow(5)]),
    )


@pytest.mark.parametrize(
    ("first", "stop", "expected"),
    [
        (0, 6, [(0, 0, 3, 1), (3, 9, 10, 2), (4, 4, 6, 3)]),
        (1, 5, [(0, 1, 3, 1), (2, 9, 10, 2), (3, 4, 5, 3)]),
        (3, 4, [(0, 9, 10, 2)]),
        (5, 6, [(0, 5, 6, 3)]),
        (2, 2, []),
    ],
)
def test_spans_are_cut_to_a_range_of_tokens(first: int, stop: int, expected: list[tuple[int, ...]]) -> None:
    found = [
        (span.first, span.start, span.stop, int(span.block_table[0])) for span in spans_within(plan(), first, stop)
    ]
    assert found == expected
    assert sum(end - begin for _, begin, end, _ in found) == stop - first


def test_a_plan_advances_in_the_arrays_that_it_has() -> None:
    """Two sequences, of which one enters its next block."""
    plan = RunningPlan(
        tokens=np.array([7, 8], np.int32),
        positions=np.array([3, 9], np.int32),
        slots=np.array([7, 33], np.int32),
        span_length=np.ones(2, np.int32),
        block_tables=np.array([[1, 5, 0], [2, 4, 8]], np.int32),
        rows=pack([SamplingRow(0, new_number=4), SamplingRow(1)]),
        generation=3,
    )
    assert plan.can_advance
    assert plan.span_context.tolist() == [4, 10]
    held = (plan.tokens, plan.positions, plan.slots, plan.rows.new_number)
    plan.advance(np.array([1, 2], np.int32), 4)
    assert [each.tolist() for each in held] == [[1, 2], [4, 10], [20, 34], [5, 1]]
    assert plan.span_context.tolist() == [5, 11]
    assert plan.generation == 3
