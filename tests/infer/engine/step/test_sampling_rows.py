"""Rows of logits laid out as columns, merged, and sampled again with masks."""

from dataclasses import fields

import numpy as np

from tk.core.casts import Array
from tk.infer.engine.step.sampling_rows import NO_MASK, SAMPLE, WITH_CANDIDATES, SampledRows, SamplingRows, ScoredRow
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.infer.sampling_row import SamplingRow, pack

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


def test_rows_are_laid_out_as_columns() -> None:
    rows = pack(ROWS)
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
    rows = pack([])
    assert len(rows) == 0
    assert rows.token.dtype == rows.bias_token.dtype == np.int32
    assert rows.top_p.dtype == np.float32


def test_rows_that_are_sampled_again_have_masks_of_their_own() -> None:
    rows = pack([SamplingRow(i, mask=mask) for i, mask in enumerate((0, WITH_CANDIDATES, NO_MASK, WITH_CANDIDATES))])
    assert (rows.are_masked, rows.have_candidates) == (True, True)
    again = rows.masked(np.array([3, 1], np.int32))
    assert again.mask.tolist() == [NO_MASK, 1, NO_MASK, 0]
    assert (again.are_masked, again.have_candidates) == (True, False)
    assert rows.mask.tolist() == [0, WITH_CANDIDATES, NO_MASK, WITH_CANDIDATES]


def test_rows_are_merged_in_the_order_of_their_tokens() -> None:
    others = [SamplingRow(token=0, target=1), SamplingRow(token=4, target=3, num_top=2)]
    merged, places = pack(ROWS[1:]).merge(pack(others))
    expected = pack([*others, *ROWS[1:]])
    assert places.tolist() == [2, 3]
    for f in fields(SamplingRows):
        assert getattr(merged, f.name).tolist() == getattr(expected, f.name).tolist()


def test_rows_that_score_have_no_options() -> None:
    scored = [ScoredRow(3, target=7, num_top=2), ScoredRow(4, target=0)]
    found, expected = SamplingRows.scoring(np.array(scored, np.int32)), pack(list(map(SamplingRow.of, scored)))
    for f in fields(SamplingRows):
        one, two = getattr(found, f.name), getattr(expected, f.name)
        assert (one.dtype, one.tolist()) == (two.dtype, two.tolist()), f.name


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def test_a_span_has_a_row_for_its_last_token_and_each_proposal() -> None:
    rows = SampledRows.of(
        np.stack([ints(4, 7, 2, 3), ints(0, 5, 6, 11), ints(8, 9, 0, 1), ints(0, -1, -1, 1)]), ints(1, 0, 3, 2)
    )
    assert rows.mask.tolist() == [0, -1, -1, -1, 1, 2]
    assert rows.slot.tolist() == [4, 2, 2, 2, 3, 3]
    assert rows.token.tolist() == [0, 6, 7, 8, 11, 12]
    assert rows.number.tolist() == [8, 0, 1, 2, 1, 2]
    assert rows.num_proposals.tolist() == [0, 0, 1, 2, 0, 1]
    plain = SampledRows.of(np.stack([ints(4, 7), ints(0, 5), ints(8, 9), ints(-1, -1)]), ints(1, 0))
    assert (plain.slot.tolist(), plain.token.tolist(), plain.num_proposals.tolist()) == ([4], [0], [0])
    assert {each.dtype for each in (rows.slot, rows.token, rows.number, plain.token)} == {np.dtype(np.int32)}


def test_rows_count_up_to_the_first_wrong_proposal() -> None:
    rows = SampledRows.of(np.stack([ints(0, 1, 2), ints(0, 4, 5), ints(0, 0, 0), ints(-1, -1, -1)]), ints(4, 1, 3))
    given = ints(9, 5, 6, 7, 9, 9, 5, 6)
    for sampled, expected in (
        ([5, 6, 7, 8, 1, 5, 6, 7], [1, 1, 1, 1, 1, 1, 1, 1]),
        ([5, 0, 7, 8, 1, 0, 6, 7], [1, 1, 0, 0, 1, 1, 0, 0]),
        ([0, 6, 7, 8, 9, 5, 0, 7], [1, 0, 0, 0, 1, 1, 1, 0]),
    ):
        assert rows.come_true(ints(*sampled), given).tolist() == [bool(each) for each in expected]
