"""Who is computed in the next step: continuous batching under a token budget, in plain Python.

There is no prefill phase and no decode phase (as in vLLM's V1 scheduler): every sequence has tokens that are known and
tokens that are computed, and a step moves some of the second number towards the first. A long prompt is computed in
chunks of what the budget leaves. First come, first served within a priority. Where blocks run out, the last in that
order gives all of its back and is computed anew later.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from ..core.errors import Overloaded, PromptTooLong
from ..core.integers import ceil_div
from .block_allocator import BlockAllocator
from .sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + length) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the step reaches the sequence's last known token, after which a new one is chosen."""
        return self.start + self.length == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Limits:
    """See EngineOptions."""

    max_running: int
    max_queued: int
    max_batched_tokens: int
    max_model_len: int


class Scheduler:
    """Owns the two queues and the blocks. Not thread-safe: the engine's lock guards it."""

    def __init__(self, limits: Limits, num_blocks: int, block_size: int) -> None:
        self.limits = limits
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def num_live(self) -> int:
        """Sequences that are waiting or running."""
        return len(self.waiting) + len(self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues the samples of one request, all or none.

        Raises:
            PromptTooLong: prompt and new tokens can never fit.
            Overloaded: running and waiting places are taken. An idle scheduler takes any request.
        """
        new = list(sequences)
        for sequence in new:
            self._check_fits(sequence)
        places = self.limits.max_running + self.limits.max_queued
        if self.num_live and self.num_live + len(new) > places:
            raise Overloaded(
                f"{len(self.running)} sequences are running and {len(self.waiting)} waiting; there are places for "
                f"{self.limits.max_running} and {self.limits.max_queued}. Try again later."
            )
        for sequence in new:
            bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> tuple[ScheduledChunk, ...]:
        """The next step: one token of every decoding sequence, then chunks of prompts. Empty only if none is live.

        Takes blocks, may preempt; `advance` must be called with each chunk once it is computed.
        """
        chunks = self._decode_chunks()
        budget = self.limits.max_batched_tokens - len(chunks)
        taken = {chunk.sequence for chunk in chunks}
        for sequence in self.running:
            if budget and sequence not in taken:
                length = min(budget, sequence.num_uncomputed)
                chunks.append(ScheduledChunk(sequence, sequence.num_computed, length))
                budget -= length
        while budget and self._can_admit():
            sequence = self._admit()
            length = min(budget, sequence.num_uncomputed)
            chunks.append(ScheduledChunk(sequence, 0, length))
            budget -= length
        return tuple(chunks)

    def advance(self, chunk: ScheduledChunk) -> bool:
        """Records that a chunk was computed; False if its sequence is no longer running."""
        if chunk.sequence.status is not Status.RUNNING:
            return False
        chunk.sequence.num_computed = chunk.start + chunk.length
        return True

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state, and frees its blocks. Idempotent."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.status = Status.FINISHED

    def expired(self, now: float) -> list[Sequence]:
        """Live sequences whose deadline has passed (`now` as time.monotonic())."""
        return [s for s in (*self.running, *self.waiting) if s.deadline is not None and s.deadline <= now]

    def check(self) -> None:
        """Raises AssertionError where the queues and the blocks contradict each other."""
        self.allocator.check(block for sequence in self.running for block in sequence.blocks)
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        assert len(self.running) <= self.limits.max_running, "too many sequences run"
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            assert all(sequence.status is status for sequence in queue), f"a sequence in {status} is not"
            assert queue == sorted(queue, key=lambda s: s.order), f"{status} is out of order"
        for sequence in self.running:
            assert sequence.num_computed <= len(sequence.blocks) * self.block_size, "computed tokens without a block"

    def _check_fits(self, sequence: Sequence) -> None:
        capacity = self.allocator.num_blocks * self.block_size
        longest = min(self.limits.max_model_len, capacity)
        if sequence.max_tokens > longest:
            new = sequence.max_tokens - sequence.num_prompt
            why = "max_model_len" if longest == self.limits.max_model_len else "the KV cache's tokens"
            raise PromptTooLong(
                f"{sequence.num_prompt} prompt tokens and {new} new ones are {sequence.max_tokens}, more than {why} "
                f"= {longest}. Shorten the prompt or lower max_new_tokens.",
                field="stopping.max_new_tokens" if sequence.num_prompt < longest else "prompt",
            )

    def _decode_chunks(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        for sequence in [s for s in self.running if s.num_uncomputed == 1]:
            missing = self._blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            while missing > self.allocator.num_free and sequence.status is Status.RUNNING:
                self._preempt(self.running[-1])
            if sequence.status is Status.RUNNING:
                sequence.blocks += self.allocator.allocate(max(0, missing))
                chunks.append(ScheduledChunk(sequence, sequence.num_computed, 1))
        return chunks

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.limits.max_running:
            return False
        spare = len(self.running)  # a block for each that runs, or the newcomer would soon be preempted
        return self._blocks_for(len(self.waiting[0].tokens)) + spare <= self.allocator.num_free

    def _admit(self) -> Sequence:
        sequence = self.waiting.pop(0)
        sequence.blocks = self.allocator.allocate(self._blocks_for(len(sequence.tokens)))
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)
