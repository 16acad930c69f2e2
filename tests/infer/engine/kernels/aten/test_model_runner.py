"""A rank's step: logits and tokens against `transformers`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tk.core.casts import Array
from tk.infer.engine.kernels.aten import model_runner
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.sampler.sampler import run_sampler
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.tests.infer.sampling_row import SamplingRow, pack

TOKENS = [5, 6, 7, 1, 2]
MakeRunner = Callable[..., Backend]


def plan(rows: list[SamplingRow]) -> RunningPlan:
    """Returns a plan of two prompts: tokens 5, 6, 7 in block 1 and tokens 1, 2 in block 2."""
    return RunningPlan(
        tokens=np.array(TOKENS, np.int32),
        positions=np.array([0, 1, 2, 0, 1], np.int32),
        slots=np.array([16, 17, 18, 32, 33], np.int32),
        span_length=np.array([3, 2], np.int32),
        block_tables=np.array([[1], [2]], np.int32),
        rows=pack(rows),
    )


def test_prompts_of_one_step_do_not_see_each_other(
    make_runner: MakeRunner, reference: Callable[[str], LlamaForCausalLM]
) -> None:
    model = reference("grouped")
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([part])).logits[0] for part in (TOKENS[:3], TOKENS[3:])])
    rows = [SamplingRow(token=token) for token in (0, 2, 4)]
    runner = make_runner("grouped", "fp32", "fp32", 3)
    torch.testing.assert_close(torch.from_numpy(runner.logits(plan(rows))), expected[[0, 2, 4]], rtol=1e-4, atol=1e-4)
    result = runner.step(plan(rows))
    assert result is not None
    assert result.token_ids.tolist() == expected[[0, 2, 4]].argmax(dim=-1).tolist()


def test_logits_of_a_long_prompt_are_made_and_sampled_64_rows_at_a_time(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, sizes = 100, []
    long = RunningPlan(
        tokens=np.arange(length, dtype=np.int32),
        positions=np.arange(length, dtype=np.int32),
        slots=np.arange(16, 16 + length, dtype=np.int32),
        span_length=np.array([length], np.int32),
        block_tables=np.arange(1, 8, dtype=np.int32)[None],
        rows=pack([SamplingRow(token=token, num_top=1) for token in range(length)]),
    )

    def observed(logits_RV: Array, *arguments: Any) -> SamplerOutput:
        sizes.append(len(logits_RV))
        return run_sampler(logits_RV, *arguments)

    monkeypatch.setattr(model_runner, "run_sampler", observed)
    runner = make_runner("grouped", "fp32", "fp32", 8)
    result = runner.step(long)
    assert result is not None
    assert result.token_ids.tolist() == runner.logits(long).argmax(axis=1).tolist()
    assert result.top_ids[:, 0].tolist() == result.token_ids.tolist()
    assert (max(sizes), sum(sizes)) == (64, length)
