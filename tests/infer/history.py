"""Greedy decoding without processes that keeps every token's logits, to compare two schedules."""

from collections.abc import Sequence

import torch

from tk.infer.backends.backend import Backend
from tk.infer.requests.sampling_params import SamplingParams
from tk.infer.scheduling.batch_writer import BatchWriter
from tk.infer.scheduling.scheduler import Limits, Scheduler
from tk.infer.scheduling.sequence import Sequence as Sample
from tk.infer.scheduling.step_message import StepMessage
from tk.infer.workers.persistent_batch import PersistentBatch

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
        self.writer, self.batch = BatchWriter(8, lambda sequence: ()), PersistentBatch(BLOCK_SIZE)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.preemptions = 0

    def run(self, which: Sequence[int]) -> "History":
        """Greedy decoding of those prompts together."""
        self.policy.add(
            Sample(str(i), 0, i, SamplingParams(), 0, prompt, len(prompt) + self.num_new)
            for i, prompt in ((i, self.prompts[i]) for i in which)
        )
        while chunks := self.policy.schedule():
            last = [chunk for chunk in chunks if chunk.is_last]
            plan = self.batch.plan(StepMessage.decode(bytearray(self.writer.write(chunks).encode())))
            logits = torch.from_numpy(self.runner.logits(plan))
            self.batch.feed(logits.argmax(-1).numpy())
            for chunk in chunks:
                self.policy.advance(chunk)
            for chunk, row in zip(last, logits, strict=True):
                self._take(chunk.sequence, row)
        return self

    def _take(self, sample: Sample, row: torch.Tensor) -> None:
        self.logits.setdefault(sample.arrival, []).append(row)
        sample.append(int(row.argmax()))
        if sample.num_new == self.num_new:
            self.tokens[sample.arrival] = sample.output
            self.preemptions += sample.preemptions
            self.policy.finish(sample)
            self.writer.release(sample)
