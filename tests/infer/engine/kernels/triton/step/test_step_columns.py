"""The columns of a step, and those of a bucket."""

from dataclasses import replace

import numpy as np

from tk.infer.engine.kernels.triton.step.step_columns import DECODE_COLUMNS, decode_columns, step_columns
from tk.infer.engine.step.running_plan import RunningPlan
from tk.tests.infer.sampling_row import SamplingRow, pack

PLAN = RunningPlan(
    tokens=np.array([5, 6, 7, 1], np.int32),
    positions=np.array([3, 4, 5, 9], np.int32),
    slots=np.array([19, 20, 21, 41], np.int32),
    span_length=np.array([3, 1], np.int32),
    block_tables=np.array([[1, 0], [2, 3]], np.int32),
    rows=pack(
        [
            SamplingRow(
                2, temperature=0.5, seed=2**64 - 2, sample_index=4, new_number=7, top_k=9, top_p=0.5, min_p=0.25
            ),
            SamplingRow(3),
        ]
    ),
)


def test_spans_have_their_first_tokens_and_positions() -> None:
    found = step_columns(PLAN)
    assert all(each.dtype == np.int32 for each in found.values())
    assert (found["firsts"].tolist(), found["starts"].tolist(), found["lengths"].tolist()) == ([0, 3], [3, 9], [3, 1])
    assert found["wanted"].tolist() == [2, 3]
    assert found["temperature"].view(np.float32).tolist() == [0.5, 0.0]
    assert (found["seed_low"].tolist(), found["seed_high"].tolist()) == ([-2, 0], [-1, 0])
    assert (found["top_k"].tolist(), found["top_p"].view(np.float32).tolist()) == ([9, 0], [0.5, 1.0])
    assert found["min_p"].view(np.float32).tolist() == [0.25, 0.0]


def test_padding_of_a_bucket_is_nowhere() -> None:
    single = replace(
        PLAN,
        **{name: getattr(PLAN, name)[2:] for name in ("tokens", "positions", "slots")},
        span_length=np.ones(2, np.int32),
        rows=replace(PLAN.rows, token=np.arange(2, dtype=np.int32)),
    )
    found = dict(zip(DECODE_COLUMNS, decode_columns(single, 4).tolist(), strict=True))
    assert (found["tokens"], found["positions"]) == ([7, 1, 0, 0], [5, 9, -1, -1])
    assert (found["slots"], found["new_number"]) == ([21, 41, -1, -1], [7, 0, 0, 0])
    assert (found["seed_low"], found["seed_high"]) == ([-2, 0, 0, 0], [-1, 0, 0, 0])
