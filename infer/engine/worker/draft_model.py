"""The draft model of an engine: a worker of its own, which proposes the next tokens of samples one step after another.

It samples with the options and the noise of the served model, so that the two choose the same token as often as their
distributions allow. Its cache has the same blocks: token i of a sample lies in the same place of both. A sample that is
drafted has a follower, whose tokens end in the draft's own until the served model's are known. Then it goes on behind
those that are equal. What its prompt or an earlier request's draft has left in full blocks is not computed again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ....core.casts import Array
from ..job import Job
from ..schedule.batch_writer import BatchWriter
from ..schedule.block_allocator import BlockAllocator
from ..schedule.live_request import LiveRequest
from ..schedule.proposing.draft_policy import DraftPolicy
from ..schedule.proposing.forced import allowed_tokens
from ..schedule.samples.sample import UNKNOWN, Output, Sample, ScheduledChunk, Source, Status
from .worker_group import WorkerGroup

_CATCHES_UP = 2  # tokens of a sample that the draft reads at once where it has all before the newest ones


@dataclass(eq=False, slots=True)
class _Follower:
    """A sample as the draft sees it, and the number of its output tokens that the served model chose."""

    sample: Sample
    num_known: int = 0


class DraftModel:
    """The draft; only the engine's thread uses it.

    Attributes:
        workers: the group of one process that computes it.
        policy: chooses how many tokens it proposes.
        seconds: the time that the newest proposals took.

    Args:
        job: the worker's job.
        allocator: the blocks of both caches.
        max_running: the largest number of running samples.
    """

    def __init__(
        self, workers: WorkerGroup, job: Job, policy: DraftPolicy, allocator: BlockAllocator, max_running: int
    ) -> None:
        self.workers, self.policy, self.seconds = workers, policy, 0.0
        self._job, self._allocator, self._max_running = job, allocator, max_running
        self._followers: dict[Sample, _Follower] = {}
        self.batch = BatchWriter(max_running)

    def start(self, timeout: float) -> None:
        """Loads the draft; see `WorkerGroup.start`."""
        self.workers.start(self._job, timeout)

    def restart(self, timeout: float) -> float:
        """Loads it again in another process; see `WorkerGroup.restart`."""
        self._followers, self.batch = {}, BatchWriter(self._max_running)
        return self.workers.restart(self._job, timeout)

    def fill(
        self, planned: Sequence[tuple[ScheduledChunk, LiveRequest]], meanwhile: Callable[[], object] = lambda: None
    ) -> list[tuple[ScheduledChunk, LiveRequest]]:
        """Returns the chunks of a step with the draft's proposals, where there is room for some.

        Args:
            planned: the chunks of a step, with room for proposals.
            meanwhile: is called while the draft computes.

        Raises:
            WorkerDied: see `WorkerGroup.receive`.
        """
        begun = time.monotonic()
        wanted = {chunk.sample: len(chunk.proposals) for chunk, _ in planned if chunk.source is Source.DRAFT}
        self.seconds = 0.0
        if not wanted:
            return [*planned]
        made = self._propose(wanted, meanwhile)
        self.seconds = time.monotonic() - begun
        return [
            (_filled(chunk, made), request) if chunk.sample in wanted else (chunk, request)
            for chunk, request in planned
        ]

    def _propose(self, wanted: dict[Sample, int], meanwhile: Callable[[], object]) -> dict[Sample, list[int]]:
        """Returns tokens that may follow those of samples; none yet of those of which it has more to read first."""
        begun = time.monotonic()
        followers = {sample: self._follow(sample) for sample in wanted}
        first = self._first_chunks([each.sample for each in followers.values()])
        if not first:
            return {}
        ready = {follower.sample: wanted[sample] for sample, follower in followers.items()}
        ready = {chunk.sample: ready[chunk.sample] for chunk in first if chunk.is_last}
        self.workers.watch.begin(lambda: 0.0)
        self._send(first)
        steps = max(ready.values(), default=1)
        rounds = [list(ready), *([each for each, count in ready.items() if count > i] for i in range(1, steps))]
        for those in rounds[1:]:
            self._send([ScheduledChunk(sample, sample.num_computed, 1) for sample in those])
        meanwhile()
        is_short, read = all(chunk.length <= _CATCHES_UP for chunk in first), begun
        for those in rounds:
            _take(those, self.workers.receive().token_ids)
            read = time.monotonic() if those is rounds[0] else read  # it has read all tokens before its own
        self.workers.watch.rest()
        now = time.monotonic()
        self.policy.spend(len(first), steps, now - begun)
        if is_short and ready:
            self.policy.observe(len(first), steps, now - begun)
        elif steps > 1:
            self.policy.observe(len(ready), steps - 1, now - read)
        made = {sample: self._end(sample, each) for sample, each in followers.items()}
        return {sample: tokens for sample, tokens in made.items() if tokens}

    def _follow(self, sample: Sample) -> _Follower:
        """Returns a sample's follower with the tokens that are known now."""
        found = self._followers.get(sample)
        if found is None:
            self._forget_ended()
            found = self._followers[sample] = _Follower(_followed(sample))
        own, real = found.sample.output.tokens, sample.output.tokens
        same = found.num_known
        while same < min(len(own), len(real)) and own[same] == real[same]:
            same += 1
        own[same:] = real[same:]
        found.num_known = len(real)
        follower, table = found.sample, found.sample.table
        table.blocks = sample.table.blocks
        follower.num_computed = min(follower.num_computed, sample.num_prompt + same, sample.num_tokens - 1)
        if follower.preemptions != sample.preemptions:
            follower.preemptions, follower.num_computed = sample.preemptions, 0
        if sample.num_tokens - follower.num_computed > _CATCHES_UP:
            follower.num_computed = max(follower.num_computed, self._num_drafted(sample))
        if sample.request.params.has_penalties:
            self.batch.release(follower)  # whose counts have tokens that did not come true
        return found

    def _num_drafted(self, sample: Sample) -> int:
        """Returns how many leading tokens are in blocks whose keys the draft has; the last one is always computed."""
        size, is_drafted = self._job.block_size, self._allocator.is_drafted
        num_full = (sample.num_tokens - 1) // size
        return size * next((i for i in range(num_full) if not is_drafted(sample.table.blocks[i])), num_full)

    def _first_chunks(self, followers: list[Sample]) -> list[ScheduledChunk]:
        """Returns the tokens that the draft lacks, within the tokens of a step: those of few tokens first.

        Of samples that share the next block, one alone computes it.
        """
        room, size, taken, chunks = (
            self._job.max_batched_tokens,
            self._job.block_size,
            set[int](),
            list[ScheduledChunk](),
        )
        for sample in sorted(followers, key=lambda each: each.num_uncomputed):
            block = sample.table.blocks[sample.num_computed // size]
            length = min(room, sample.num_uncomputed)
            if length and block not in taken:
                taken.add(block)
                room -= length
                chunks.append(ScheduledChunk(sample, sample.num_computed, length))
        return chunks

    def _send(self, chunks: Sequence[ScheduledChunk]) -> None:
        message = self.batch.write(chunks).encode()
        for chunk in chunks:
            is_last, chunk.sample.num_computed = chunk.is_last, chunk.stop
            if is_last:
                chunk.sample.output.tokens.append(UNKNOWN)
        self.workers.send(message)

    def _end(self, sample: Sample, follower: _Follower) -> list[int]:
        """Records what the draft has computed of a sample, and returns its proposals."""
        own, size = follower.sample, self._job.block_size
        num_sure = min(own.num_computed, sample.num_tokens)
        self._allocator.add_drafted(sample.table.blocks[: num_sure // size])
        if sample.output.draft is not None:
            sample.output.draft.num_computed = num_sure
        return own.output.tokens[follower.num_known :]

    def _forget_ended(self) -> None:
        """Gives up the followers of samples that do not run."""
        for sample in [each for each in self._followers if each.status is not Status.RUNNING]:
            self.batch.release(self._followers.pop(sample).sample)


def _followed(sample: Sample) -> Sample:
    """Returns a follower that has computed nothing, without what the draft has no part in."""
    params = replace(sample.request.params, logprobs=None, prompt_logprobs=None)
    request = replace(sample.request, params=params, lease=None)
    output = Output(sample.output.max_tokens, stopping=sample.output.stopping)
    follower = Sample(request, sample.index, sample.arrival, sample.seed, output)
    follower.preemptions, follower.status = sample.preemptions, Status.RUNNING
    return follower


def _take(followers: Sequence[Sample], tokens: Array) -> None:
    """Gives followers the tokens that the draft chose, each in place of its first unknown one."""
    for follower, token in zip(followers, tokens.tolist(), strict=True):
        own = follower.output.tokens
        own[own.index(UNKNOWN)] = token


def _filled(chunk: ScheduledChunk, made: dict[Sample, list[int]]) -> ScheduledChunk:
    """Returns a chunk with proposals in place of the room for them, up to the first one that a constraint forbids."""
    tokens, matcher = made.get(chunk.sample, []), chunk.sample.output.matcher
    if matcher is not None:
        tokens = allowed_tokens(matcher, tokens)
    return replace(chunk, length=chunk.stop - chunk.start + len(tokens), proposals=tuple(tokens))
