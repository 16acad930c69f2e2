"""The scheduler, which chooses the tokens of the next step: continuous batching under a token budget.

As in vLLM's V1 scheduler, prefill and decode are not separate phases: every sequence has known tokens, of which some
are computed, and a step computes more of them. A long prompt is computed in chunks that fit the rest of the budget.
Within a priority, requests are served in the order of submission. If blocks run out, the last running sequence in that
order frees all of its blocks and is computed again later.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from ...core.errors import Overloaded, PromptTooLong
from ...core.integers import ceil_div
from .block_allocator import BlockAllocator
from .sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + length) of a sequence, which one step computes."""

    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the step reaches the sequence's last known token, after which a new one is chosen."""
        return self.start + self.length == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on sequences and tokens; see EngineOptions."""

    max_running: int
    max_queued: int
    max_batched_tokens: int
    max_model_len: int


class Scheduler:
    """The queues of waiting and running sequences, and the blocks. Not thread-safe: the engine's lock guards it."""

    def __init__(self, limits: Limits, num_blocks: int, block_size: int) -> None:
        self.limits = limits
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def num_live(self) -> int:
        """The number of sequences that are waiting or running."""
        return len(self.waiting) + len(self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues all samples of one request, or none if it raises.

        Raises:
            PromptTooLong: prompt and new tokens can never fit.
            Overloaded: the limits on running and queued sequences are reached; an idle scheduler accepts any request.
        """
        new = list(sequences)
        for sequence in new:
            self._check_fits(sequence)
        places = self.limits.max_running + self.limits.max_queued
        if self.num_live and self.num_live + len(new) > places:
            raise Overloaded(
                f"{len(self.running)} sequences are running and {len(self.waiting)} waiting; the limits are "
                f"{self.limits.max_running} and {self.limits.max_queued}. Try again later."
            )
        for sequence in new:
            bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> tuple[ScheduledChunk, ...]:
        """Chooses the next step: one token of every decoding sequence, then chunks of prompts.

        The result is empty only if no sequence is live. The method allocates blocks and may preempt sequences. The
        caller must call `advance` for each chunk after the step.
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
        """Records that a chunk was computed; returns False if its sequence no longer runs."""
        if chunk.sequence.status is not Status.RUNNING:
            return False
        chunk.sequence.num_computed = chunk.start + chunk.length
        return True

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence in any state and frees its blocks; a second call does nothing."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.status = Status.FINISHED

    def expired(self, now: float) -> list[Sequence]:
        """Returns the live sequences whose deadline is not after `now`, a value of time.monotonic()."""
        return [s for s in (*self.running, *self.waiting) if s.deadline is not None and s.deadline <= now]

    def check(self) -> None:
        """Checks that the queues and the blocks are consistent; raises AssertionError otherwise."""
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
        spare = len(self.running)  # a free block for each running sequence, or the new one would soon be preempted
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
