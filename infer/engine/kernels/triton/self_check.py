"""The check of the backend before it serves: a prompt and steps behind it, beside the ATen backend on the same rank."""

from dataclasses import replace
from typing import Final

import numpy as np

from .....core.casts import Array
from ...job import Job
from ...step.running_plan import RunningPlan
from ...step.sampling_rows import SamplingRows
from ..backend import Backend
from ..sampler.sampler import run_sampler

MOST: Final = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.05}  # by dtype: the distance of logits, relative to their norm
_TOKENS: Final = 20  # of the prompt
_STEPS: Final = 2
_ONE: Final = np.ones(1, np.float32)
# The options of the rows that are sampled: without filters, and with.
_SAMPLES: Final = ({"top_p": _ONE}, {"top_k": np.full(1, 8, np.int32), "top_p": _ONE / 2})
LONGEST: Final = _TOKENS + _STEPS  # tokens of the sequence


def why_not_serve(ours: Backend, theirs: Backend, job: Job, vocab_size: int) -> str:
    """Returns the difference between two backends with the same weights and cache; "" if there is none that counts.

    Args:
        ours: the backend that is checked.
        theirs: the one that it is compared with.
        job: that of both; the first blocks of its cache are written.
        vocab_size: the number of tokens.
    """
    prompt = _plan(np.arange(_TOKENS, dtype=np.int32) % vocab_size, 0, job)
    plans = [prompt, *(_plan(np.full(1, 1, np.int32), _TOKENS + i, job) for i in range(_STEPS))]
    expected = [theirs.logits(plan) for plan in plans]
    for plan, theirs_RV in zip(plans, expected, strict=True):
        ours_RV = ours.logits(plan)
        distance = float(np.linalg.norm(ours_RV - theirs_RV) / max(float(np.linalg.norm(theirs_RV)), 1e-30))
        if not distance <= MOST[job.dtype]:  # NaN, too
            what = "of a prompt" if plan is prompt else "behind a prompt"
            return f"the logits {what} differ from ATen's by {distance:.2g} of their norm"
        for options in _SAMPLES:
            rows = replace(plan.rows, **options)
            sampled = ours.step(replace(plan, rows=rows))
            assert sampled is not None, "every rank samples"
            if not np.array_equal(sampled.token_ids, run_sampler(ours_RV, rows).token_ids):
                return "its sampler chooses other tokens than the host's"
    return ""


def _plan(tokens: Array, first: int, job: Job) -> RunningPlan:
    """Returns a step of one sequence, whose last token has the only row, a sample.

    Blocks get twins only where plans give them: a cache without such twins has no place for them.
    """
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    blocks = np.arange(1, 2 + int(positions[-1]) // job.block_size, dtype=np.int32)
    return RunningPlan(
        tokens=tokens,
        positions=positions,
        slots=positions + np.int32(job.block_size),
        span_length=np.array([len(tokens)], np.int32),
        block_tables=blocks[None],
        rows=_sample(len(tokens) - 1),
        twins=np.repeat(blocks[:, None], 2, axis=1)[: len(blocks) * (job.num_twins > 0)],
    )


def _sample(token: int) -> SamplingRows:
    rows = SamplingRows.scoring(np.array([[token, -1, -1]], np.int32))
    return replace(rows, temperature=_ONE)
