"""A request's logits are the same bits alone, in company, in any cut of its prompt and after preemption."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tk.infer.engine import make_plan
from tk.infer.model_runner import ModelRunner
from tk.infer.sampling_params import SamplingParams
from tk.infer.scheduler import Limits, Scheduler
from tk.infer.sequence import Sequence as Sample
from tk.infer.step_plan import Row

NUM_NEW = 36
PROMPTS = tuple(
    tuple(int(token) for token in np.random.default_rng(i).integers(0, 260, length))
    for i, length in enumerate((3, 300, 17, 64, 1))
)


class History:
    """The logits behind every new token of every prompt, under one schedule."""

    def __init__(self, runner: ModelRunner, num_blocks: int, budget: int, num_new: int) -> None:
        self.runner = runner
        self.num_new = num_new
        self.policy = Scheduler(Limits(8, 99, budget, 640), num_blocks, runner.cache.block_size)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.preemptions = 0

    def run(self, which: Sequence[int]) -> "History":
        """Greedy decoding of those prompts together."""
        self.policy.add(
            Sample(str(i), 0, i, SamplingParams(), 0, list(PROMPTS[i]), len(PROMPTS[i]), len(PROMPTS[i]) + self.num_new)
            for i in which
        )
        while chunks := self.policy.schedule():
            firsts = np.cumsum([0, *[chunk.length for chunk in chunks]])
            last = [chunk for chunk in chunks if chunk.is_last]
            rows = [Row(int(end) - 1) for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.is_last]
            logits = self.runner.logits(make_plan(chunks, rows, self.runner.cache.block_size))
            for chunk in chunks:
                self.policy.advance(chunk)
            for chunk, row in zip(last, logits, strict=True):
                self._take(chunk.sequence, row)
        return self

    def _take(self, sample: Sample, row: torch.Tensor) -> None:
        self.logits.setdefault(sample.arrival, []).append(row)
        sample.append(int(row.argmax()))
        if sample.num_new == self.num_new:
            self.tokens[sample.arrival] = sample.tokens[sample.num_prompt :]
            self.preemptions += sample.preemptions
            self.policy.finish(sample)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "name", "threads"),
    [
        ("fp32", "fp32", "grouped", 1),
        ("fp32", "fp32", "tied", 2),
        ("fp32", "int8", "tied", 1),
        ("fp32", "bf16", "grouped", 1),
        ("bf16", "bf16", "grouped", 1),
        ("bf16", "int8", "tied", 2),
        ("bf16", "fp32", "tied", 1),
    ],
)
def test_logits_are_bit_equal(
    make_runner: Callable[..., ModelRunner], dtype: str, kv_dtype: str, name: str, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = make_runner(name, dtype, kv_dtype, 100)
        # Threads that a busy machine keeps waiting are slow: fewer of everything.
        everybody, num_new = (range(len(PROMPTS)), NUM_NEW) if threads == 1 else (range(1, 3), 5)
        alone = {i: History(runner, 100, 512, num_new).run([i]).logits[i] for i in everybody}
        for num_blocks, budget in ((100, 512), (100, 40), (23, 64)):
            together = History(runner, num_blocks, budget, num_new).run(everybody)
            assert (together.preemptions > 0) == (num_blocks == 23 and threads == 1)
            for i in everybody:
                assert len(together.logits[i]) == num_new
                for step, (one, other) in enumerate(zip(alone[i], together.logits[i], strict=True)):
                    assert torch.equal(one, other), (
                        f"prompt {i}, new token {step}, {num_blocks} blocks, {budget} tokens"
                    )
    finally:
        torch.set_num_threads(before)
