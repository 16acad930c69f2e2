"""The scheduler, which chooses the tokens of the next step: continuous batching under a token budget.

As in vLLM's V1 scheduler, prefill and decode are not separate phases: every sample has known tokens, of which some
are computed, and a step computes more of them. A long prompt is computed in chunks that fit the rest of the budget.
`WaitQueue` says who is served next. A sample is admitted when all of its known tokens fit beside those that run, and
begins after the tokens that `BlockManager` finds computed. If places or blocks are held by principals above their
share, or blocks run out later, `FairPlaces` says which running samples are preempted: they wait again, and others take
their blocks from the tail as they need them. Of one principal the oldest of the highest priority always runs on, so
everyone ends. One sample of a request computes the prompt.
"""

import bisect
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Final

from .activity import Activity
from .block_allocator import BlockAllocator
from .block_manager import BlockManager
from .fair_places import FairPlaces
from .proposing.proposals import ProposalPolicy
from .proposing.step_proposals import StepProposals
from .samples.sample import UNKNOWN, Sample, ScheduledChunk, Source, Status
from .step_cost import StepBudget, StepCost, StepSize
from .waiting.admission import Admission, Limits
from .waiting.request_queue import RequestQueue

_LOG: Final = logging.getLogger(__name__)


class Scheduler:
    """The queues of waiting and running samples, and the blocks. Not thread-safe: the engine's lock guards it.

    The work of a step grows with the number of running samples, not with that of waiting ones.

    Attributes:
        cost: the duration of steps, as `observe` learns it.
        proposals: the choice of proposals.
        proposed: the proposals of steps.
        running: the running samples, in the order in which they are computed.
        queue: the other ones.
        activity: the tokens that were computed.
    """

    def __init__(self, limits: Limits, num_blocks: int, block_size: int, num_twins: int = 0) -> None:
        self.limits = limits
        self.running: list[Sample] = []
        self.cost = StepCost()
        self.proposals = ProposalPolicy()
        self.queue = RequestQueue()
        self.activity = Activity()
        self._blocks = BlockManager(num_blocks, block_size, num_twins)
        self.proposed = StepProposals(self.proposals, self._blocks, self.running)
        self._places = FairPlaces(limits, self._blocks, self.running, self.queue)
        self._admission = Admission(limits, self.cost, self._blocks, self.running, self.queue)

    @property
    def allocator(self) -> BlockAllocator:
        """The allocator of the cache's blocks."""
        return self._blocks.allocator

    @property
    def num_live(self) -> int:
        """The number of samples that are not finished."""
        return len(self.running) + len(self.queue)

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens that are computed before all live samples decode."""
        return self._admission.num_queued_tokens()

    @property
    def num_leaked_blocks(self) -> int:
        """The number of used blocks that no live sample holds."""
        return self._blocks.num_leaked(self._live())

    def add(self, samples: Iterable[Sample], now: float = -math.inf) -> None:
        """Queues all samples of one request, or none if it raises.

        Args:
            samples: the samples, which share prompt, priority, principal and deadline.
            now: a value of time.monotonic(); without it deadlines are not looked at.

        Raises:
            PromptTooLong: prompt and new tokens can never fit.
            DeadlinePassed: the first token is not expected before the deadline.
            Overloaded: a limit on live samples or queued tokens is reached, of all or of the principal.
        """
        new = list(samples)
        self._admission.check(new, now)
        self.queue.enter(new)

    def schedule(self) -> tuple[ScheduledChunk, ...]:
        """Chooses the next step: one token of every decoding sample, then chunks of prompts, then proposals.

        The result is empty only if no sample is live. The method allocates blocks and may preempt samples. The
        caller must call `advance` for each chunk after the step.
        """
        self._blocks.drop_twins(self.running)
        self._admit_by_shares()
        decoding, chunks = self._decode_chunks(), list[ScheduledChunk]()
        prompts = self._places.prompts() if len(decoding) < len(self.running) else []
        if prompts:
            decoding = self._places.leave_room(decoding)
        bound = self.limits.max_step_seconds
        planned = None if bound is None else bound / self.cost.margin
        budget = StepBudget(self.limits.max_batched_tokens, planned, self.cost)
        for chunk in decoding:
            budget.reserve(chunk.start, chunk.length)
        for sample in prompts:
            if length := budget.reserve_prompt(sample.num_computed, sample.num_uncomputed):
                chunks.append(ScheduledChunk(sample, sample.num_computed, length))
        while (first := self.queue.waiting.first()) and budget.room(0, 1) and self._admit(first):
            length = budget.reserve_prompt(first.num_computed, first.num_uncomputed)
            if not length:
                break  # the tokens before it, which are computed, make its first token cost more than there is room for
            chunks.append(ScheduledChunk(first, first.num_computed, length))
        decoding = self.proposed.beside(decoding, budget)
        self._places.charge(decoding, chunks)
        for chunk in (step := (*decoding, *chunks)):
            self._blocks.assign_twins(chunk.sample, chunk.start, chunk.start + chunk.length)
        return step

    def advance(self, chunk: ScheduledChunk) -> bool:
        """Records that a chunk was computed, or will be before the next step; returns False if its sample has ended.

        When the prompt of a request is computed, its other samples are queued and share its blocks.
        """
        sample = chunk.sample
        if sample.status is not Status.RUNNING:
            return False
        sample.num_computed = chunk.stop
        if chunk.proposals:
            self.activity.propose(chunk.source, len(chunk.proposals))
            if chunk.source is not Source.CONSTRAINT:
                sample.output.num_proposed += len(chunk.proposals)
            if chunk.source is Source.DRAFT and sample.output.draft is not None:
                sample.output.draft.propose(len(chunk.proposals))
        if chunk.start < sample.num_prompt:
            self._blocks.publish(sample)
            if sample.num_computed >= sample.num_prompt:
                has_others = self.queue.release_group(sample)
                if has_others and not chunk.proposals:  # which are stored behind the prompt already
                    self._blocks.share_last(sample)
        return True

    def accept(self, sample: Sample, source: Source = Source.TEXT) -> None:
        """Records that the first proposal after a sample's tokens came true, and that another token follows it.

        The sample runs: no step is chosen before the results of proposals, so none has preempted it.
        """
        sample.num_computed += 1
        self.activity.accept(source)
        sample.output.num_accepted += source is not Source.CONSTRAINT
        if source is Source.DRAFT and sample.output.draft is not None:
            sample.output.draft.accept()
        sample.output.tokens.append(UNKNOWN)

    def finish(self, sample: Sample) -> None:
        """Removes a sample in any state and frees its blocks; a second call does nothing."""
        if sample.status is Status.FINISHED:
            return
        if sample.status is Status.RUNNING:
            self.running.remove(sample)
        self.queue.leave(sample)
        self._blocks.release(sample, keep=not sample.table.is_private)
        sample.status = Status.FINISHED

    def observe(self, chunks: Sequence[ScheduledChunk], seconds: float, period: float | None = None) -> None:
        """Records the duration of the step that computed `chunks`.

        Args:
            period: the time from the results of the step before to its own; None if the workers had nothing to do.
        """
        size, num_prompt, is_decoding, has_proposals = _size(chunks), 0, True, False
        for chunk in chunks:
            if chunk.start < chunk.sample.num_prompt:
                num_prompt += min(chunk.stop, chunk.sample.num_prompt) - chunk.start
                is_decoding = False
            has_proposals = has_proposals or bool(chunk.proposals)
        self.activity.step(num_prompt)
        self._places.pass_time(seconds)
        if self.limits.slow_step_seconds is not None and seconds > self.limits.slow_step_seconds:
            words = "slow step: %.0f ms for %d tokens, %d of them of prompts; %d sequences run, %d wait"
            num_running = len(self.running)
            _LOG.warning(words, 1000 * seconds, size.num_tokens, num_prompt, num_running, self.num_live - num_running)
        if num_prompt and self.limits.max_step_seconds is not None:
            self.cost.learn_margin(self.cost.seconds(size), seconds, self.limits.max_step_seconds)
        self.cost.observe(size, seconds)
        if is_decoding and period is not None:
            self.proposals.observe(size.num_tokens, period, has_proposals)

    def predict(self, chunks: Iterable[ScheduledChunk]) -> float:
        """Returns the expected duration of a step, in seconds; 0 if no step was observed yet."""
        return self.cost.seconds(_size(chunks))

    def expire(self, now: float) -> list[Sample]:
        """Finishes the samples that are too late, and returns them.

        They are those whose deadline is not after `now`, a value of time.monotonic(), and those that would be admitted
        next although their own prompt alone takes until their deadline.
        """
        late: list[Sample] = []
        while (sample := self.queue.first_expired(now)) is not None:
            self.finish(sample)
            late.append(sample)
        while (sample := self.queue.waiting.first()) is not None and not self._admission.is_in_time(sample, 0, now):
            self.finish(sample)
            late.append(sample)
        return late

    def check_integrity(self) -> None:
        """Checks that the queues and the blocks are consistent; raises AssertionError otherwise."""
        live = self._live()
        assert len(live) == len(set(live)), "a sample is in a queue twice"
        assert len(self.running) <= self.limits.max_running, "too many samples run"
        assert self.running == sorted(self.running, key=lambda s: s.order), "the running are out of order"
        assert all(sample.status is Status.RUNNING for sample in self.running), "a running sample does not run"
        assert all(sample.status is Status.WAITING for sample in self.queue), "a waiting sample does not wait"
        self.queue.check_integrity(live)
        self._blocks.check_integrity(live)

    def _live(self) -> list[Sample]:
        return [*self.running, *self.queue]

    def _admit_by_shares(self) -> None:
        """Admits samples that come before what runs, and preempts those of principals above their shares for them."""
        for find in (self.queue.waiting.first, self.queue.waiting.first_new):
            while first := find():
                victims = self._places.victims(first)
                if not victims and not self._places.comes_first(first):
                    break
                for victim in victims:
                    self._preempt(victim)
                if not self._admit(first):
                    break

    def _decode_chunks(self) -> list[ScheduledChunk]:
        chunks, num_preempted = list[ScheduledChunk](), self.activity.num_preempted
        for sample in [s for s in self.running if s.num_uncomputed == 1]:
            missing = self._blocks.missing(sample)
            while missing > self.allocator.num_available and sample.status is Status.RUNNING:
                self._preempt(self._places.last())
            if sample.status is Status.RUNNING:
                if missing:
                    self._blocks.grow(sample)
                chunks.append(ScheduledChunk(sample, sample.num_computed, 1))
        if self.activity.num_preempted == num_preempted:
            return chunks
        return [chunk for chunk in chunks if chunk.sample.status is Status.RUNNING]

    def _admit(self, sample: Sample) -> bool:
        """Lets a waiting sample run, if there is a place and all of its known tokens fit; returns whether it does.

        One that begins as a running prompt does waits until that prompt's blocks are computed, and shares them.
        """
        if len(self.running) >= self.limits.max_running:
            return False
        if self.running and self._blocks.is_coming(sample, self.running):
            return False
        spare = len(self.running)  # a block for each running sample, or the new one would soon be preempted
        if not self._blocks.admit(sample, spare):
            return False
        self.queue.waiting.discard(sample)
        if not sample.index and not sample.preemptions:
            self.activity.admit(sample.num_prompt, sample.num_computed)
        sample.status = Status.RUNNING
        self._places.admit(sample)
        bisect.insort(self.running, sample, key=lambda s: s.order)
        return True

    def _preempt(self, sample: Sample) -> None:
        self.running.remove(sample)
        sample.table.max_reused = max(sample.table.max_reused, sample.num_computed)  # these logits were computed
        sample.quantum.num_charged = max(sample.quantum.num_charged, sample.num_computed)
        self._blocks.release(sample)
        sample.status = Status.WAITING
        sample.preemptions += 1
        self.activity.num_preempted += 1
        self.queue.waiting.push(sample)


def _size(chunks: Iterable[ScheduledChunk]) -> StepSize:
    return StepSize.of((chunk.start, chunk.length) for chunk in chunks)
