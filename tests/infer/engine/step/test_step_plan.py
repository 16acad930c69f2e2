"""Step plans: rows laid out as columns, results there and back, spans of a range of tokens."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tk.infer.engine.step.step_plan import (
    ASKED,
    NO_MASK,
    NUM_CANDIDATES,
    SAMPLE,
    SamplerOutput,
    SamplingRow,
    SamplingRows,
    StepPlan,
    spans_within,
)
from tk.infer.engine.step.token_counts import TokenCounts

ROWS = [
    SamplingRow(token=2, target=7, num_top=3),
    SamplingRow(
        token=5,
        temperature=0.5,
        top_k=4,
        seed=2**64 - 1,
        sample_index=1,
        new_number=6,
        bias={9: -1.5, 3: float("-inf")},
        counts=TokenCounts({4: 0, 8: 2}),
    ),
    SamplingRow(token=6, counts=TokenCounts({8: 1})),
]


def plan() -> StepPlan:
    """Returns a plan of three spans: 3 tokens at the start, one token after 9, and 2 tokens after 4."""
    return StepPlan(
        tokens=np.arange(6, dtype=np.int32),
        positions=np.array([0, 1, 2, 9, 4, 5], np.int32),
        slots=np.array([16, 17, 18, 41, 52, 53], np.int32),
        span_length=np.array([3, 1, 2], np.int32),
        span_context=np.array([3, 10, 6], np.int32),
        block_tables=np.array([[1, 0], [2, 5], [3, 0]], np.int32),
        rows=SamplingRows.pack(ROWS),
    )


def test_rows_are_laid_out_as_columns() -> None:
    rows = SamplingRows.pack(ROWS)
    assert len(rows) == 3
    assert rows.token.tolist() == [2, 5, 6]
    assert rows.target.tolist() == [7, SAMPLE, SAMPLE]
    assert rows.temperature.tolist() == [0.0, 0.5, 0.0]
    assert rows.seed.tolist() == [0, 2**64 - 1, 0]
    assert rows.seed.dtype == np.uint64
    assert (rows.sample_index.tolist(), rows.new_number.tolist()) == ([0, 1, 0], [0, 6, 0])
    bias = zip(rows.bias_row, rows.bias_token, rows.bias_value, strict=True)
    assert list(bias) == [(1, 9, -1.5), (1, 3, float("-inf"))]
    assert list(zip(rows.count_row, rows.count_token, rows.count_value, strict=True)) == [
        (1, 4, 0),
        (1, 8, 2),
        (2, 8, 1),
    ]
    assert rows.bias_value.dtype == np.float32
    assert rows.count_value.dtype == np.int32


def test_no_rows_are_empty_columns() -> None:
    rows = SamplingRows.pack([])
    assert len(rows) == 0
    assert rows.token.dtype == rows.bias_token.dtype == np.int32
    assert rows.top_p.dtype == np.float32


def test_a_result_comes_back_from_its_bytes() -> None:
    scored = SamplerOutput(
        token_ids=np.array([5, 9], np.int32),
        finite=np.array([1, 0], np.uint8),
        logprob=np.array([-0.5, 0], np.float32),
        rank=np.array([2, 0], np.int32),
        top_ids=np.array([[5, 3], [0, 0]], np.int32),
        top_logprobs=np.array([[-0.5, -2], [0, 0]], np.float32),
        candidates=np.zeros((2, 0), np.int32),
    )
    none = np.zeros((2, 0), np.int32)
    plain = replace(scored, logprob=np.zeros(2, np.float32), rank=none.sum(1, np.int32), top_ids=none)
    plain = replace(plain, top_logprobs=none.astype(np.float32))
    asked = np.arange(2 * NUM_CANDIDATES, dtype=np.int32).reshape(2, NUM_CANDIDATES)
    for output in (scored, plain, replace(scored, candidates=asked), replace(plain, candidates=asked)):
        again = SamplerOutput.decode(output.encode())
        for f in fields(SamplerOutput):
            one, two = getattr(again, f.name), getattr(output, f.name)
            assert (one.dtype, one.tolist()) == (two.dtype, two.tolist())


def test_outputs_are_joined_with_the_widest_columns() -> None:
    tokens, finite, asked = np.array([4], np.int32), np.ones(1, np.uint8), np.arange(3, dtype=np.int32)[None]
    parts = [SamplerOutput.of_tokens(tokens, finite), SamplerOutput.of_tokens(tokens, finite, asked)]
    assert SamplerOutput.join(parts).candidates.tolist() == [[-1, -1, -1], [0, 1, 2]]


def test_rows_that_are_sampled_again_have_masks_of_their_own() -> None:
    rows = SamplingRows.pack([SamplingRow(i, mask=mask) for i, mask in enumerate((0, ASKED, NO_MASK, ASKED))])
    assert (rows.are_masked, rows.are_asked) == (True, True)
    again = rows.masked(np.array([3, 1], np.int32))
    assert again.mask.tolist() == [NO_MASK, 1, NO_MASK, 0]
    assert (again.are_masked, again.are_asked) == (True, False)
    assert rows.mask.tolist() == [0, ASKED, NO_MASK, ASKED]


def test_rows_are_merged_in_the_order_of_their_tokens() -> None:
    others = [SamplingRow(token=0, target=1), SamplingRow(token=4, target=3, num_top=2)]
    merged, places = SamplingRows.pack(ROWS[1:]).merge(SamplingRows.pack(others))
    expected = SamplingRows.pack([*others, *ROWS[1:]])
    assert places.tolist() == [2, 3]
    for f in fields(SamplingRows):
        assert getattr(merged, f.name).tolist() == getattr(expected, f.name).tolist()


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
