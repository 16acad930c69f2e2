"""Rows of logits laid out as columns, merged, and sampled again with masks."""

from dataclasses import fields

import numpy as np

from tk.infer.engine.step.sampling_rows import NO_MASK, SAMPLE, WITH_CANDIDATES, SamplingRow, SamplingRows
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


def test_rows_that_are_sampled_again_have_masks_of_their_own() -> None:
    rows = SamplingRows.pack(
        [SamplingRow(i, mask=mask) for i, mask in enumerate((0, WITH_CANDIDATES, NO_MASK, WITH_CANDIDATES))]
    )
    assert (rows.are_masked, rows.have_candidates) == (True, True)
    again = rows.masked(np.array([3, 1], np.int32))
    assert again.mask.tolist() == [NO_MASK, 1, NO_MASK, 0]
    assert (again.are_masked, again.have_candidates) == (True, False)
    assert rows.mask.tolist() == [0, WITH_CANDIDATES, NO_MASK, WITH_CANDIDATES]


def test_rows_are_merged_in_the_order_of_their_tokens() -> None:
    others = [SamplingRow(token=0, target=1), SamplingRow(token=4, target=3, num_top=2)]
    merged, places = SamplingRows.pack(ROWS[1:]).merge(SamplingRows.pack(others))
    expected = SamplingRows.pack([*others, *ROWS[1:]])
    assert places.tolist() == [2, 3]
    for f in fields(SamplingRows):
        assert getattr(merged, f.name).tolist() == getattr(expected, f.name).tolist()
