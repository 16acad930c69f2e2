"""Bits that depend on a request alone: not on its batch, the cuts of its prompt, preemption, lookahead or threads."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tk.core.dtypes import COMPUTE_NAMES
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kv_formats import KV_DTYPES, kv_format
from tk.tests.example_counts import sized
from tk.tests.infer.engine.kernels.native.running import BEST, logits, runner
from tk.tests.infer.history import BLOCK_SIZE, MAX_RUNNING, History
from tk.tests.model.architectures import ENTRIES, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
PROMPTS = tuple(
    tuple(int(token) for token in np.random.default_rng(i).integers(0, VOCAB, length))
    for i, length in enumerate((3, 37, 17, 1, 20, 33))
)
NUM_COPIES = 3 * MAX_RUNNING + 512 // BLOCK_SIZE  # as many as these sequences and steps need at most
ROWS = sized((*range(1, 18), 31, 32, 33, 511, 512), (2, 3, 5, 8, 13, 17, 33, 512))  # test_products.py has all
DTYPES = tuple(product(COMPUTE_NAMES, KV_DTYPES))
SELECTED = {
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("bf16", "int8"),
    ("fp16", "fp16"),
    ("bf16", "fp8"),
    ("bf16", "int4"),
    ("fp32", "k8v4"),
}
IN_COMPANY = {
    ("qwen2 sliding", *each) for each in (("fp32", "fp32"), ("bf16", "int8"), ("bf16", "int4"), ("fp16", "fp16"))
}
COMBINATIONS = [
    pytest.param(dtype, kv_dtype, 1 + i % 4, marks=() if (dtype, kv_dtype) in SELECTED else pytest.mark.matrix)
    for i, (dtype, kv_dtype) in enumerate(DTYPES)
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "instruction_set",
    [pytest.param(name, marks=() if name == BEST else pytest.mark.matrix) for name in instruction_sets()],
)
@pytest.mark.parametrize(("dtype", "kv_dtype", "threads"), COMBINATIONS)
def test_any_number_of_rows_in_a_step_gives_the_same_bits(
    tmp_path: Path, dtype: str, kv_dtype: str, threads: int, instruction_set: str
) -> None:
    """The logits of every token of a prompt, which is computed in steps of so many tokens."""
    ENTRIES["llama3"].make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 530).tolist()
    alone, made = (runner(tmp_path, dtype, kv_dtype, count, instruction_set) for count in (1, threads))
    expected = logits(alone, tokens, range(1, len(tokens)))  # token by token
    assert np.isfinite(expected).all()
    for rows in ROWS:
        cuts = range(rows, 64 if rows < 20 else len(tokens), rows)  # a long last step follows small ones
        assert np.array_equal(logits(made, tokens, cuts), expected), rows
    alone.close()
    made.close()


def test_rows_of_a_wide_model_have_the_same_bits_although_few_pass_a_weight_together(tmp_path: Path) -> None:
    """Rows of 8,192 columns fill the second cache soon: parts of 64 rows pass all panels, and long sums are cut."""
    entry = ENTRIES["llama3"]
    replace(entry, options=entry.options | {"intermediate_size": 8192}).make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 330).tolist()
    made = [runner(tmp_path, "bf16", "bf16", threads) for threads in (1, 3)]
    expected = logits(made[0], tokens, range(48, len(tokens), 48))
    for each in made:
        assert np.array_equal(logits(each, tokens, ()), expected)
        each.close()


@pytest.mark.parametrize(("weight_dtype", "threads"), [("int8", 2), ("int4", 3)])
def test_any_number_of_rows_gives_the_same_bits_with_quantized_weights(
    tmp_path: Path, weight_dtype: str, threads: int
) -> None:
    ENTRIES["llama3"].make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
    alone, made = (runner(tmp_path, "bf16", "bf16", count, weight_dtype=weight_dtype) for count in (1, threads))
    expected = logits(alone, tokens, range(1, len(tokens)))  # token by token
    assert np.isfinite(expected).all()
    for rows in (2, 3, 4, 5, 6, 7, 12, 13, 33, 90):
        assert np.array_equal(logits(made, tokens, range(rows, len(tokens), rows)), expected), rows
    alone.close()
    made.close()


@pytest.mark.parametrize("weight_dtype", ["int8", pytest.param("int4", marks=pytest.mark.matrix)])
def test_bits_are_the_same_in_company_with_quantized_weights(tmp_path: Path, weight_dtype: str) -> None:
    check_histories(tmp_path, "llama3", "bf16", "int8", 2, BEST, weight_dtype)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype", "threads"),
    [
        pytest.param(*each, marks=() if each[:3] in IN_COMPANY else pytest.mark.matrix)
        for each in (
            (name, *values, 1 + i % 4) for name in ("qwen2 sliding", "mixtral") for i, values in enumerate(DTYPES)
        )
    ],
)
def test_bits_are_the_same_in_company_and_after_preemption(
    tmp_path: Path, name: str, dtype: str, kv_dtype: str, threads: int
) -> None:
    check_histories(tmp_path, name, dtype, kv_dtype, threads, BEST)


@pytest.mark.parametrize("instruction_set", instruction_sets()[:-1])
def test_bits_are_the_same_in_company_with_any_instruction_set(tmp_path: Path, instruction_set: str) -> None:
    check_histories(tmp_path, "llama3", "bf16", "int8", 2, instruction_set)


def check_histories(
    folder: Path,
    name: str,
    dtype: str,
    kv_dtype: str,
    threads: int,
    instruction_set: str,
    weight_dtype: str = "auto",
) -> None:
    """Compares prompts alone with prompts together, whose steps are planned ahead, in large and small caches."""
    ENTRIES[name].make(folder)
    num_twins = NUM_COPIES if kv_format(kv_dtype).num_twins else 0
    made = runner(folder, dtype, kv_dtype, threads, instruction_set, weight_dtype=weight_dtype, num_twins=num_twins)
    every_prompt = range(len(PROMPTS))
    alone = [History(made, 100, 512, PROMPTS, 24, num_twins=num_twins).run([i]) for i in every_prompt]
    for num_blocks, budget in ((100, 512), (100, 23), (8, 64)):
        together = History(made, num_blocks, budget, PROMPTS, 24, ahead=1, num_twins=num_twins).run(every_prompt)
        assert (together.preemptions > 0) == (num_blocks == 8)
        assert together.in_vain > 0, "a step was in flight when a request ended"
        for i in every_prompt:
            assert torch.equal(torch.stack(together.logits[i]), torch.stack(alone[i].logits[i])), (i, num_blocks)
    made.close()
