"""Greedy decoding without processes that keeps every token's logits, to compare two schedules."""

from collections.abc import Sequence

import numpy as np
import torch

from tk.infer.backends.backend import Backend
from tk.infer.engine import make_plan
from tk.infer.requests.sampling_params import SamplingParams
from tk.infer.scheduling.scheduler import Limits, Scheduler
from tk.infer.scheduling.sequence import Sequence as Sample
from tk.infer.scheduling.step_plan import SamplingRow

BLOCK_SIZE = 16  # of the runners that `make_runner` makes


class History:
    """The logits behind every new token of every prompt, under one schedule."""

    def __init__(
        self, runner: Backend, num_blocks: int, budget: int, prompts: Sequence[Sequence[int]], num_new: int
    ) -> None:
        self.runner = runner
        self.prompts = prompts
        self.num_new = num_new
        self.policy = Scheduler(Limits(8, 99, budget, 640), num_blocks, BLOCK_SIZE)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.preemptions = 0

    def run(self, which: Sequence[int]) -> "History":
        """Greedy decoding of those prompts together."""
        self.policy.add(
            Sample(str(i), 0, i, SamplingParams(), 0, list(prompt), len(prompt), len(prompt) + self.num_new)
            for i, prompt in ((i, self.prompts[i]) for i in which)
        )
        while chunks := self.policy.schedule():
            firsts = np.cumsum([0, *[chunk.length for chunk in chunks]])
            last = [chunk for chunk in chunks if chunk.is_last]
            rows = [SamplingRow(int(end) - 1) for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.is_last]
            logits = torch.from_numpy(self.runner.logits(make_plan(chunks, rows, BLOCK_SIZE)))
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
