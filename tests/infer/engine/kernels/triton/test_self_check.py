"""The check before a backend serves, of two that agree and of some that do not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.triton.run.model_runner import TritonRunner
from tk.infer.engine.kernels.triton.self_check import why_not_serve
from tk.infer.engine.step.running_plan import RunningPlan
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.model.architectures import ENTRIES, VOCAB

JOB = Job("", "triton", "fp32", "int4", 8, 0, 16, 64, num_twins=7)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[TritonRunner, Backend]:
    """A backend and ATen's."""
    ENTRIES["llama3"].make(tmp_path)
    ours, theirs, _ = runners(tmp_path, kv_dtype="int4")
    return ours, theirs


def check(pair: tuple[TritonRunner, Backend]) -> str:
    """Returns what the check finds."""
    return why_not_serve(*pair, JOB, VOCAB)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int4"])
def test_a_cache_without_twins_that_plans_assign_passes(kv_dtype: str, tmp_path: Path) -> None:
    """It has no place for them: on a GPU such an index ends the process' use of CUDA."""
    ENTRIES["llama3"].make(tmp_path)
    ours, theirs, _ = runners(tmp_path, kv_dtype=kv_dtype, num_twins=0)
    assert why_not_serve(ours, theirs, replace(JOB, num_twins=0), VOCAB) == ""


def test_backends_that_agree_pass(pair: tuple[TritonRunner, Backend]) -> None:
    assert check(pair) == ""


@pytest.mark.parametrize(("broken", "where"), [(0, "of a prompt"), (2, "behind a prompt")])
def test_other_logits_fail(
    broken: int, where: str, pair: tuple[TritonRunner, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, count = pair[0].logits, iter(range(9))

    def wrong(plan: RunningPlan) -> Array:
        found = logits(plan)
        return found * np.float32(np.nan if next(count) == broken else 1)

    monkeypatch.setattr(pair[0], "logits", wrong)
    assert f"the logits {where} differ from ATen's by nan" in check(pair)


def test_another_sampler_fails(pair: tuple[TritonRunner, Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    step = pair[0].step

    def wrong(plan: RunningPlan) -> object:
        output = step(plan)
        output.token_ids[:] = (output.token_ids + 1) % VOCAB
        return output

    monkeypatch.setattr(pair[0], "step", wrong)
    assert check(pair) == "its sampler chooses other tokens than the host's"
