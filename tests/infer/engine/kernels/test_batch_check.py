"""The check of `--batch-invariant`: kernels of CPUs pass, and a backend whose logits depend on the batch is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tk.core.casts import Array
from tk.core.errors import ConfigError
from tk.infer.engine.job import Job
from tk.infer.engine.kernels import choose
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.batch_check import ProbedSequence, why_not_invariant
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.step.running_plan import NO_ADAPTER, RunningPlan
from tk.infer.engine.worker.worker import load

VOCAB = 101


@pytest.fixture
def job(model_folder: Callable[[str], Path]) -> Job:
    """A job with room for the longest prompt of the check."""
    return Job(str(model_folder("grouped")), "auto", "fp32", "fp32", 6, 0, 16, max_batched_tokens=80)


@pytest.mark.parametrize("kernels", ["native", "aten"])
@pytest.mark.parametrize(
    ("kv_dtype", "weight_dtype"),
    [
        ("fp32", "fp32"),
        pytest.param("k8v4", "int8", marks=pytest.mark.matrix),
        pytest.param("int4", "int4", marks=pytest.mark.matrix),
    ],
)
def test_kernels_of_cpus_pass(kernels: str, kv_dtype: str, weight_dtype: str, job: Job) -> None:
    twins = 0 if kv_dtype == "fp32" else 6
    changed = replace(job, kernels=kernels, kv_dtype=kv_dtype, weight_dtype=weight_dtype, num_twins=twins)
    assert load(replace(changed, batch_invariant=True)).kernels.startswith(kernels)


@pytest.mark.parametrize("kernels", ["native", pytest.param("aten", marks=pytest.mark.matrix)])
def test_rows_with_an_adapter_are_checked_before_there_is_one(
    kernels: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter of the check changes what it computes, and is gone afterwards."""
    slots, found = [], []

    def noted(logits: Callable[[RunningPlan], Array], job: Job, vocab: int, slot: int = NO_ADAPTER) -> str:
        slots.append(slot)
        found.append(logits(ProbedSequence(9, job.block_size, vocab, slot=slot).step([range(9)])))
        return why_not_invariant(logits, job, vocab, slot) or ("" if len(slots) < 4 else "they differ")

    monkeypatch.setattr(choose, "why_not_invariant", noted)
    adapted = replace(job, kernels=kernels, batch_invariant=True, adapter_slots=1, max_adapter_rank=24)
    backend = load(adapted)
    assert slots == [NO_ADAPTER, 0]
    assert not np.allclose(found[0], found[1], atol=1e-2)
    found.append(backend.logits(ProbedSequence(9, job.block_size, found[0].shape[1]).step([range(9)])))
    np.testing.assert_array_equal(found[2], found[0])
    with pytest.raises(ConfigError, match=r"cannot be kept on rank 0 with the kernels .*: with an adapter they differ"):
        load(adapted)


class Changed:
    """Logits of a backend, one bit of which is changed in steps with so many spans and tokens.

    Attributes:
        changed: these numbers.
        steps: those of all steps.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.changed = (0, 0)
        self.steps: list[tuple[int, int]] = []

    def __call__(self, plan: RunningPlan) -> Array:
        found = self._backend.logits(plan)
        self.steps.append((len(plan.span_length), len(plan.tokens)))
        if self.steps[-1] == self.changed:
            found.view(np.uint32)[-1, -1] ^= 1
        return found


def test_one_bit_is_seen(job: Job) -> None:
    logits = Changed(load(job))
    assert why_not_invariant(logits, job, VOCAB) == ""
    for spans, tokens, reason in (
        (1, 1, "a part of 1 tokens have other bits than in a prompt of 72 tokens"),
        (1, 31, "a part of 31 tokens"),
        (17, 17, "17 tokens beside one another"),
        (3, 72, "a prompt between two single tokens"),
    ):
        logits.changed = (spans, tokens)
        assert f"the logits of {reason}" in why_not_invariant(logits, job, VOCAB)


def test_a_small_cache_has_a_short_prompt(job: Job) -> None:
    small = replace(job, num_blocks=1, max_batched_tokens=9)
    logits = Changed(load(small))
    assert why_not_invariant(logits, small, VOCAB) == ""
    assert logits.steps == [(1, 9), (1, 5), (1, 1), (1, 3), (1, 1), (2, 2), (3, 3), (8, 8), (3, 9)]


def test_a_difference_ends_the_start(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = NativeRunner.logits

    def wrong(self: NativeRunner, plan: RunningPlan) -> Array:
        return plain(self, plan) + np.float32(len(plan.tokens) == 1)

    monkeypatch.setattr(NativeRunner, "logits", wrong)
    load(job)
    with pytest.raises(ConfigError, match=r"cannot be kept on rank 0 with the kernels native .* a part of 1 tokens"):
        load(replace(job, kernels="native", batch_invariant=True))
