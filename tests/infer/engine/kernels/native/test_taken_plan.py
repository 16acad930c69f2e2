"""A plan that advances in place: the samples of plans that are made anew for every step."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.step.step_plan import SamplingRow, SamplingRows, StepPlan
from tk.tests.infer.engine.kernels.native.running import logits, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LENGTHS = (BLOCK_SIZE - 2, 5)


def test_a_plan_that_advances_gives_the_samples_of_new_plans(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path)
    advancing, renewing = runner(tmp_path), runner(tmp_path, threads=2)
    for made in (advancing, renewing):
        for i, length in enumerate(LENGTHS):
            logits(made, range(3, 3 + length), (), first_block=1 + 4 * i)
    table = np.array([[1, 2], [5, 6]], np.int32)
    start = np.array(LENGTHS, np.int32)
    plan = StepPlan(
        tokens=np.array([7, 8], np.int32),
        positions=start.copy(),
        slots=table[:, 0] * BLOCK_SIZE + start,
        span_length=np.ones(2, np.int32),
        span_context=start + 1,
        block_tables=table,
        rows=SamplingRows.pack([SamplingRow(i, temperature=1.0, seed=i, num_top=2 * i - 1) for i in range(2)]),
    )
    found = []
    for _ in range(5):
        output, expected = advancing.step(plan), renewing.step(deepcopy(plan))
        assert output.encode() == expected.encode()
        found.append(output.token_ids.tolist())
        plan.tokens[:] = output.token_ids
        for counted in (plan.positions, plan.span_context, plan.rows.new_number):
            counted += 1
        plan.slots[:] = table[[0, 1], plan.positions // BLOCK_SIZE] * BLOCK_SIZE + plan.positions % BLOCK_SIZE
    assert len(np.unique(found, axis=0)) > 1
    advancing.close()
    renewing.close()
