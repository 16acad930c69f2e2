"""A request's logits are the same bits alone, in company, in any cut of its prompt and after preemption."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kv_formats import kv_format
from tk.tests.example_counts import sized
from tk.tests.infer.history import History

NUM_NEW, FEW = sized(36, 20), sized(23, 21)  # tokens, and blocks that are too few for all at once
PROMPTS = tuple(
    tuple(int(token) for token in np.random.default_rng(i).integers(0, 260, length))
    for i, length in enumerate((3, 300, 17, 64, 1))
)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "name", "threads"),
    [
        ("fp32", "fp32", "grouped", 1),
        pytest.param("fp32", "fp32", "tied", 2, marks=pytest.mark.matrix),
        pytest.param("fp32", "int8", "tied", 1, marks=pytest.mark.matrix),
        pytest.param("fp32", "bf16", "grouped", 1, marks=pytest.mark.matrix),
        ("bf16", "bf16", "grouped", 1),
        pytest.param("bf16", "int8", "tied", 2, marks=pytest.mark.matrix),
        # Copies in 8 bits of blocks of 4 bits have, on this backend, the samples that share them, below.
        pytest.param("fp32", "int4", "tied", 1, marks=pytest.mark.matrix),
        pytest.param("bf16", "k8v4", "grouped", 1, marks=pytest.mark.matrix),
        pytest.param("bf16", "fp32", "tied", 1, marks=pytest.mark.matrix),
    ],
)
def test_logits_are_bit_equal(
    make_runner: Callable[..., Backend], dtype: str, kv_dtype: str, name: str, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        num_twins = 60 if kv_format(kv_dtype).num_twins else 0  # fewer than blocks
        runner = make_runner(name, dtype, kv_dtype, 100, num_twins=num_twins)
        # Threads that a busy machine keeps waiting are slow: fewer of everything.
        every_prompt, num_new, few = (range(len(PROMPTS)), NUM_NEW, FEW) if threads == 1 else (range(1, 3), 5, 21)
        alone = {
            i: History(runner, 100, 512, PROMPTS, num_new, num_twins=num_twins).run([i]).logits[i] for i in every_prompt
        }
        for num_blocks, budget in ((100, 512), (100, 40), (few, 64)):
            together = History(runner, num_blocks, budget, PROMPTS, num_new, ahead=1, num_twins=num_twins).run(
                every_prompt
            )
            assert (together.preemptions > 0) == (num_blocks == few)
            for i in every_prompt:
                assert len(together.logits[i]) == num_new
                for step, (one, other) in enumerate(zip(alone[i], together.logits[i], strict=True)):
                    assert torch.equal(one, other), (
                        f"prompt {i}, new token {step}, {num_blocks} blocks, {budget} tokens"
                    )
    finally:
        torch.set_num_threads(before)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kernels", "dtype", "kv_dtype", "num_twins"),
    [
        ("native", "bf16", "int8", 0),
        ("native", "fp32", "k8v4", 0),
        ("native", "bf16", "int4", 60),
        ("aten", "fp32", "int4", 60),
        pytest.param("native", "bf16", "bf16", 0, marks=pytest.mark.matrix),
        pytest.param("native", "bf16", "int4", 0, marks=pytest.mark.matrix),
        pytest.param("aten", "bf16", "bf16", 0, marks=pytest.mark.matrix),
        pytest.param("aten", "bf16", "k8v4", 0, marks=pytest.mark.matrix),
    ],
)
def test_samples_that_share_blocks_have_the_bits_of_one_alone(
    make_runner: Callable[..., Backend], kernels: str, dtype: str, kv_dtype: str, num_twins: int
) -> None:
    prompts, num_new = PROMPTS[2:], 20
    runner, every_prompt = make_runner("grouped", dtype, kv_dtype, 100, kernels, num_twins), range(len(prompts))
    history = partial(History, runner, prompts=prompts, num_new=num_new, num_twins=num_twins)
    alone = [history(num_blocks=100, budget=512).run([i]).logits[i] for i in every_prompt]
    for num_blocks, budget in ((100, 512), (100, 9), (9, 64)):
        many = history(num_blocks=num_blocks, budget=budget, ahead=1, num_samples=4).run(every_prompt)
        assert many.forks > 0
        assert many.preemptions > 0 or num_blocks > 9
        assert len(many.logits) == 4 * len(prompts)
        for number, found in many.logits.items():
            assert torch.equal(torch.stack(found), torch.stack(alone[number % len(prompts)])), number
