"""The sampler within a step: every rank has the tokens, those of the logits that the same step computes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tk.core.casts import Array
from tk.infer.engine.kernels.native import model_runner
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.sampler.sampler import run_sampler
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.infer.engine.kernels.native.running import runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
NUM_ROWS = 90  # more than a part


def plan(num_rows: int) -> RunningPlan:
    """Returns the prefill of three sequences of 30 tokens, with a row of different options for each token."""
    position = np.arange(NUM_ROWS, dtype=np.int32) % 30
    table = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    rows = [
        SamplingRow(
            i,
            temperature=(0.0, 1.0, 0.7)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 0, 0, 7)[i % 4],
            num_top=i % 5 - 1,
            seed=i,
            new_number=i,
            target=11 if i % 7 == 6 else -1,
            bias={i % VOCAB: 3.0} if i % 6 == 0 else None,
            counts=TokenCounts({1: 2, i % VOCAB: 1}) if i % 8 == 0 else None,
            presence_penalty=0.5,
        )
        for i in range(num_rows)
    ]
    return RunningPlan(
        tokens=np.random.default_rng(1).integers(0, VOCAB, NUM_ROWS).astype(np.int32),
        positions=position,
        slots=np.repeat(table[:, 0] * BLOCK_SIZE, 30) + position,
        span_length=np.array([30] * 3, np.int32),
        block_tables=table,
        rows=pack(rows),
    )


def sampled(folder: Path, store: Path, tp: int, num_rows: int) -> list[tuple[SamplerOutput, Array]]:
    """Returns the samples and the logits of each rank, which has one or two threads."""

    def work(rank: int) -> tuple[SamplerOutput, Array]:
        made = runner(folder, threads=1 + rank % 2, place=(tp, rank, str(store)))
        first, logits, again = made.step(plan(num_rows)), made.logits(plan(num_rows)), made.step(plan(num_rows))
        made.close()
        assert_same(first, again)
        return first, logits

    with ThreadPoolExecutor(tp) as pool:
        return list(pool.map(work, range(tp)))


def assert_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    for name, values in asdict(expected).items():
        assert np.array_equal(getattr(found, name), values), name


@pytest.mark.parametrize(
    ("name", "tp", "num_rows"), [("llama3", 1, 90), ("llama3", 2, 90), ("mixtral", 4, 3), ("gpt2", 2, 1)]
)
def test_every_rank_has_the_tokens_of_all(tmp_path: Path, name: str, tp: int, num_rows: int) -> None:
    ENTRIES[name].make(tmp_path / "model")
    found = sampled(tmp_path / "model", tmp_path / "store", tp, num_rows)
    [(_, alone)] = sampled(tmp_path / "model", tmp_path / "alone", 1, num_rows)
    expected = run_sampler(alone, plan(num_rows).rows)
    assert (expected.rank > 0).sum() >= num_rows // 2
    for output, logits in found:
        assert np.array_equal(logits, alone)
        assert_same(output, expected)


def test_without_a_native_sampler_every_rank_samples_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ENTRIES["llama3"].make(tmp_path / "model")
    monkeypatch.setattr(model_runner, "native_sampler", lambda: None)
    for output, logits in sampled(tmp_path / "model", tmp_path / "store", 2, 90):
        assert_same(output, run_sampler(logits, plan(90).rows))
