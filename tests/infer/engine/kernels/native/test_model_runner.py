"""The native backend: `transformers`' logits for every architecture, and bits that depend on a request alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.step.running_plan import RunningPlan
from tk.tests.infer.engine.kernels.native.running import BEST, logits, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES, LENGTH, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")

DIFFERENT = ("llama3", "qwen2_moe", "gpt2")  # in norms, activations, positions and experts


@pytest.mark.parametrize(
    ("name", "instruction_set"),
    [
        pytest.param(name, each, marks=() if each == BEST or name in DIFFERENT else pytest.mark.matrix)
        for name in ENTRIES
        for each in instruction_sets()
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, instruction_set: str) -> None:
    model = ENTRIES[name].make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, LENGTH).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    made = runner(tmp_path, instruction_set=instruction_set)
    whole = logits(made, tokens, ())
    np.testing.assert_allclose(whole, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    assert np.array_equal(logits(made, tokens, (1, 2, 5, 22)), whole)
    made.close()


@pytest.mark.every(2)
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "threads", "weight_dtype"),
    [
        ("fp32", "fp32", 1, "auto"),
        ("bf16", "bf16", 2, "auto"),
        ("fp16", "int8", 3, "auto"),
        ("bf16", "int8", 4, "auto"),
        ("fp32", "fp16", 2, "auto"),
        ("bf16", "bf16", 3, "int8"),
        ("fp32", "fp32", 4, "int4"),
    ],
)
def test_bits_do_not_depend_on_cuts_and_threads(
    tmp_path: Path, dtype: str, kv_dtype: str, threads: int, weight_dtype: str, instruction_set: str
) -> None:
    ENTRIES["mixtral"].make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 64).tolist()
    alone, together = (
        runner(tmp_path, dtype, kv_dtype, count, instruction_set, weight_dtype=weight_dtype) for count in (1, threads)
    )
    expected = logits(alone, tokens, range(1, 64))  # token by token
    assert np.isfinite(expected).all()
    for cuts in ((), (1, 18), (31, 32, 33, 63)):
        assert np.array_equal(logits(together, tokens, cuts), expected)
    alone.close()
    together.close()


@pytest.mark.every(3)
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3", {"head_dim": 16}), ("llama3", {"intermediate_size": 40}), ("gpt2", {})],
    ids=["threads share heads", "panels of gate and up do not match", "gelu"],
)
def test_bits_do_not_depend_on_where_threads_wait(
    tmp_path: Path, name: str, options: dict[str, int], instruction_set: str
) -> None:
    replace(ENTRIES[name], options=ENTRIES[name].options | options).make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    alone = runner(tmp_path, "bf16", "bf16", 1, instruction_set)
    expected = logits(alone, tokens, ())
    for threads in (2, 3):
        together = runner(tmp_path, "bf16", "bf16", threads, instruction_set)
        for cuts in ((), range(1, 40), (3, 7, 12, 20)):
            assert np.array_equal(logits(together, tokens, cuts), expected), (threads, cuts)
        together.close()
    alone.close()


def test_more_rows_than_the_logits_buffer_are_sampled_in_parts(tmp_path: Path) -> None:
    ENTRIES["gpt2"].make(tmp_path)
    made = runner(tmp_path)
    count = 150
    position = np.arange(count, dtype=np.int32) % 50
    slots = (1 + np.arange(count, dtype=np.int32) // 50 * 4) * BLOCK_SIZE + position
    rows = [SamplingRow(i, num_top=i % 3, bias={7: 1e6} if i == 100 else None) for i in range(count)]
    plan = RunningPlan(
        tokens=np.arange(count, dtype=np.int32) % 50,
        positions=position,
        slots=slots,
        span_length=np.array([50] * 3, np.int32),
        block_tables=np.arange(1, 13, dtype=np.int32).reshape(3, 4),
        rows=pack(rows),
    )
    found, expected = made.step(plan), made.logits(plan).argmax(axis=-1)
    assert found is not None
    expected[100] = 7
    assert found.token_ids.tolist() == expected.tolist()
    assert found.top_ids.shape == (count, 2)
    made.close()


def test_a_step_without_rows_has_no_logits(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path)
    made = runner(tmp_path)
    plan = RunningPlan(
        tokens=np.array([1, 2], np.int32),
        positions=np.array([0, 1], np.int32),
        slots=np.array([16, 17], np.int32),
        span_length=np.array([2], np.int32),
        block_tables=np.array([[1]], np.int32),
        rows=pack([]),
    )
    assert made.logits(plan).shape == (0, VOCAB)
    output = made.step(plan)
    assert output is not None
    assert output.token_ids.shape == (0,)
    made.close()
