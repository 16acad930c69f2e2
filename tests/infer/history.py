"""Greedy decoding without processes that keeps every token's logits, to compare two schedules."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.request.adapter_lease import AdapterLease
from tk.infer.engine.schedule.batch_writer import BatchWriter
from tk.infer.engine.schedule.samples.proposer import Proposer
from tk.infer.engine.schedule.samples.sample import UNKNOWN, Sample, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.step.persistent_batch import PersistentBatch
from tk.infer.engine.step.step_message import decode_message
from tk.tests.infer.engine.schedule.new_sample import new_sample

BLOCK_SIZE = 16  # of the runners that `make_runner` makes
MAX_RUNNING = 8


class History:
    """The logits behind every new token of every prompt, under one schedule.

    Attributes:
        logits: by prompt, the logits behind each of its new tokens; further samples follow all prompts, in rounds.
        tokens: by prompt, its new tokens.
        preemptions: the number of preemptions of all prompts together.
        accepted, rejected: the numbers of proposals that came true, and of those that did not.
        in_vain: the number of tokens that were computed after the last of a prompt, in blocks that are free by then.

    Args:
        runner: the backend.
        num_blocks: the size of the cache.
        budget: the largest number of tokens of a step.
        prompts: the prompts.
        num_new: the number of new tokens of each.
        ahead: the number of steps that are planned and sent before the tokens of the one before them are known.
        proposer: returns what makes the proposals for a prompt, by its number.
        num_twins: the number of twins of blocks that the backend has (see `CacheShape`).
        num_samples: the samples of each prompt; without noise they are the same.
        leases: the holds of prompts on their adapters, by their numbers.
    """

    def __init__(
        self,
        runner: Backend,
        num_blocks: int,
        budget: int,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        ahead: int = 0,
        proposer: Callable[[int], Proposer | None] = lambda number: None,
        num_twins: int = 0,
        num_samples: int = 1,
        leases: Mapping[int, AdapterLease] = MappingProxyType({}),
    ) -> None:
        self.runner = runner
        self.prompts = prompts
        self.num_new = num_new
        self.ahead = ahead
        self.policy = Scheduler(Limits(min(MAX_RUNNING, budget), 99, budget, 640), num_blocks, BLOCK_SIZE, num_twins)
        self.writer, self.batch = BatchWriter(MAX_RUNNING), PersistentBatch(BLOCK_SIZE)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.preemptions = 0
        self.accepted = self.rejected = self.in_vain = 0
        self.proposer = proposer
        self.num_samples = num_samples
        self.leases = leases
        self.forks = 0

    def run(self, which: Sequence[int]) -> "History":
        """Greedy decoding of those prompts together."""
        for i in which:
            longest = len(self.prompts[i]) + self.num_new + self.ahead
            lease, root = self.leases.get(i), b""
            if lease is not None:
                root = lease.digest.encode()
            options: dict[str, Any] = {"root": root, "lease": lease, "principal": f"p{i % 2}"}
            self.policy.add(
                [
                    new_sample(i, self.prompts[i], longest, index=n, proposer=self.proposer(i), **options)
                    for n in range(self.num_samples)
                ]
            )
        flights: list[tuple[bytes, list[tuple[Sample, int, int | None]]]] = []
        while (chunks := self.policy.schedule()) or flights:
            chunks = tuple(chunk for chunk in chunks if self.writer.can_write(chunk))
            if chunks:
                rows = [
                    (chunk.sample, chunk.sample.num_new + i, proposal)
                    for chunk in chunks
                    if chunk.is_last
                    for i, proposal in enumerate((None, *chunk.proposals))
                ]
                flights.append((self.writer.write(chunks).encode(), rows))
                for chunk in chunks:
                    self.policy.advance(chunk)
                self.policy.observe(chunks, 0.2)  # long enough for the quanta of principals to pass
                for sample, _, proposal in rows:
                    sample.output.tokens += [UNKNOWN] if proposal is None else []
            ahead = self.ahead if chunks and not any(chunk.proposals for chunk in chunks) else 0
            while len(flights) > ahead:
                self._compute(*flights.pop(0))
            self.policy.check_integrity()
        return self

    def _compute(self, message: bytes, rows: Sequence[tuple[Sample, int, int | None]]) -> None:
        plan = self.batch.plan(decode_message(bytearray(message)))
        self.forks += len(plan.forks)
        logits = torch.from_numpy(self.runner.logits(plan))
        self.batch.feed(logits.argmax(-1).numpy())
        for (sample, place, proposal), row in zip(rows, logits, strict=True):
            if proposal is not None and (place != sample.num_new or sample.output.tokens[-1] != proposal):
                self.rejected += 1
                continue
            if sample.status is Status.FINISHED:
                self.in_vain += 1
                continue
            if proposal is not None:
                self.accepted += 1
                self.policy.accept(sample)
            number = sample.arrival + sample.index * len(self.prompts)
            self.logits.setdefault(number, []).append(row)
            sample.output.tokens[place] = int(row.argmax())
            if place + 1 == self.num_new:
                self.tokens[number] = sample.output.tokens[: self.num_new]
                self.preemptions += sample.preemptions
                self.policy.finish(sample)
                self.writer.release(sample)
