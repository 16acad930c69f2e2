"""The checks of a request before it is queued: lengths, limits, quotas and deadline. A refused one touches no block.

The limits on live samples and queued tokens hold for all callers together, the quotas for each principal. While
nothing is live, a request of any size is accepted, or a large one would be refused for ever.

One principal alone may take all that the limits allow. Others are accepted all the same until they have their shares by
weight, and each with one request: the limits are passed rather than requests refused that were accepted before, or a
principal kept out. With k principals of one weight, that is at most the limit times 1 + 1/2 + ... + 1/k, and a request
of each. One that has its share and more waits for its own requests to end.

Refusals name limits and the request's own numbers, never those of other principals: how a count of queued tokens moves
would show how much of another's prompt the prefix cache had.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .....core.errors import DeadlinePassed, Overloaded, PromptTooLong
from ...options import EngineOptions
from ..block_manager import BlockManager
from ..samples.sample import Sample
from ..step_cost import StepCost, StepSize
from .request_queue import RequestQueue

LATENESS: Final = 1.5  # a first token is expected after this many times the measured duration of the tokens before it
RETRY_SECONDS: Final = 1.0  # the least time to ask a refused caller to wait, and without a measured step
MOST_RETRY_SECONDS: Final = 60.0  # samples often end before their limits


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on samples, tokens and the predicted duration of a step; see EngineOptions. None = no limit."""

    max_running: int
    max_queued: int
    max_batched_tokens: int
    max_model_len: int
    max_step_seconds: float | None = None
    max_queued_tokens: int | None = None
    quota_sequences: int | None = None
    quota_tokens: int | None = None
    slow_step_seconds: float | None = None

    @staticmethod
    def of(options: EngineOptions, max_model_len: int) -> "Limits":
        """Returns the limits of an engine whose samples have at most `max_model_len` tokens."""
        return Limits(
            max_running=options.max_running,
            max_queued=options.max_queued,
            max_batched_tokens=options.max_batched_tokens,
            max_model_len=max_model_len,
            max_step_seconds=None if options.max_step_ms is None else options.max_step_ms / 1000,
            max_queued_tokens=options.max_queued_tokens,
            quota_sequences=options.quota_sequences,
            quota_tokens=options.quota_tokens,
            slow_step_seconds=None if options.slow_step_ms is None else options.slow_step_ms / 1000,
        )


class Admission:
    """The checks of a scheduler, over its own queues and tables.

    Args:
        cost: predicts durations.
        running: the running samples.
        queue: the other ones.
    """

    def __init__(
        self, limits: Limits, cost: StepCost, blocks: BlockManager, running: list[Sample], queue: RequestQueue
    ) -> None:
        self._limits, self._cost, self._blocks = limits, cost, blocks
        self._running, self._queue = running, queue

    def check(self, new: Sequence[Sample], now: float) -> None:
        """Checks the samples of one request.

        Args:
            new: the samples, which share prompt, priority, principal and deadline.
            now: a value of time.monotonic().

        Raises:
            PromptTooLong: prompt and new tokens can never fit.
            Overloaded: a limit is reached, of all callers or of this one.
            DeadlinePassed: the first token is not expected before the deadline.
        """
        for sample in new:
            self._check_fits(sample)
        self._check_limits(new[0], len(new))
        self._check_quota(new[0], len(new))
        self._check_deadline(new[0], now)

    def num_queued_tokens(self, principal: str | None = None) -> int:
        """Returns how many tokens are computed before all live samples decode, or all of a principal."""
        running = self._running if principal is None else self._running_of(principal)
        num_running = sum(sample.num_uncomputed for sample in running if sample.num_uncomputed > 1)
        return self._queue.waiting.num_tokens(principal) + num_running

    def is_in_time(self, sample: Sample, backlog: int, now: float) -> bool:
        """Returns whether a waiting sample's first token is expected before its deadline.

        A sample that has a token already is in time.

        Args:
            backlog: the number of tokens of others that are computed before its own.
            now: a value of time.monotonic().
        """
        if sample.request.deadline is None or sample.num_new:
            return True
        seconds = self._seconds_per_token()
        num_left = (sample.request.deadline - now) / (LATENESS * seconds) if seconds else math.inf
        num_own = sample.num_uncomputed
        if backlog + num_own >= num_left > 0:
            num_own -= self._blocks.num_cached(sample)
        return backlog + num_own < num_left and now < sample.request.deadline

    def _check_fits(self, sample: Sample) -> None:
        longest = min(self._limits.max_model_len, self._blocks.allocator.num_blocks * self._blocks.block_size)
        if sample.output.max_tokens > longest:
            new = sample.output.max_tokens - sample.num_prompt
            why = "max_model_len" if longest == self._limits.max_model_len else "the KV cache's tokens"
            raise PromptTooLong(
                f"{sample.num_prompt} prompt tokens and {new} new ones are {sample.output.max_tokens}, more than {why} "
                f"= {longest}. Shorten the prompt or lower max_new_tokens.",
                field="max_new_tokens" if sample.num_prompt < longest else "prompt",
            )

    def _check_limits(self, sample: Sample, num_samples: int) -> None:
        limits, principal = self._limits, sample.request.principal
        num_live = len(self._running) + len(self._queue)
        if not num_live:
            return
        own, part = self._queue.shares.num_live_of(principal), self._queue.shares.part(principal, sample.request.weight)
        total = limits.max_running + limits.max_queued
        if num_live + num_samples > total and own + num_samples > (part * total if own else total):
            raise Overloaded(
                f"There is no room for {num_samples} sequences more; the limits are {limits.max_running} that run and "
                f"{limits.max_queued} that wait. Try again later.",
                retry_after=self._seconds_until_a_place(self._running_of(principal) or self._running),
            )
        most, new = limits.max_queued_tokens, sample.num_prompt
        if most is None or (queued := self.num_queued_tokens()) + new <= most:
            return
        own = self.num_queued_tokens(principal)
        if own + new > (part * most if own else most):
            raise Overloaded(
                f"The queue has no room for the {new} prompt tokens of this request; it takes {most} of all callers "
                "together. Try again later.",
                retry_after=self._seconds_of(min(queued + new - most, math.ceil((own + new) / part - most))),
            )

    def _check_quota(self, sample: Sample, num_samples: int) -> None:
        limits, principal = self._limits, sample.request.principal
        num_live = self._queue.shares.num_live_of(principal)
        if not num_live:
            return
        whose, subject = f"of {principal!r}" if principal else "of callers without a name", f"principal:{principal}"
        if limits.quota_sequences is not None and num_live + num_samples > limits.quota_sequences:
            raise Overloaded(
                f"{num_live} sequences {whose} are live, and this request has {num_samples}; the quota is "
                f"{limits.quota_sequences}. Try again later.",
                retry_after=self._seconds_until_a_place(self._running_of(principal)),
                subject=subject,
            )
        if limits.quota_tokens is None:
            return
        queued = self.num_queued_tokens(principal)
        if queued + sample.num_prompt > limits.quota_tokens:
            raise Overloaded(
                f"{queued} prompt tokens {whose} are queued, and this request has {sample.num_prompt}; the quota is "
                f"{limits.quota_tokens}. Try again later.",
                retry_after=self._seconds_of(queued + sample.num_prompt - limits.quota_tokens),
                subject=subject,
            )

    def _check_deadline(self, sample: Sample, now: float) -> None:
        deadline = sample.request.deadline
        if deadline is None:
            return
        backlog = self._queue.waiting.backlog(sample, self._running)
        if not self.is_in_time(sample, backlog, now):
            num_own = sample.num_uncomputed - self._blocks.num_cached(sample)
            raise DeadlinePassed(
                f"The first token of request {sample.request.request_id} is not expected before its deadline, in "
                f"{max(0.0, deadline - now):.2f} s: the queue before it, and then {num_own} tokens of its "
                "prompt, are computed first. Allow more time or try again later."
            )

    def _running_of(self, principal: str) -> list[Sample]:
        return [sample for sample in self._running if sample.request.principal == principal]

    def _seconds_per_token(self) -> float:
        """Returns the predicted seconds per token of the largest step; 0 before any step was observed."""
        num_tokens = self._limits.max_batched_tokens
        if self._limits.max_step_seconds is not None:
            num_tokens = max(1, self._cost.longest(StepSize(), 0, num_tokens, self._limits.max_step_seconds))
        return self._cost.seconds(StepSize().plus(0, num_tokens)) / num_tokens

    def _seconds_of(self, num_tokens: int) -> float:
        """Returns the predicted seconds in which so many queued tokens are computed, as a time to wait."""
        return min(max(RETRY_SECONDS, num_tokens * self._seconds_per_token()), MOST_RETRY_SECONDS)

    def _seconds_until_a_place(self, running: Iterable[Sample]) -> float:
        """Returns the predicted seconds until one of these running samples has all tokens that it may have."""
        among = list(running)
        if not among or not self._cost.is_known:
            return RETRY_SECONDS
        size = StepSize()
        for sample in self._running:
            size = size.plus(sample.num_computed, 1)
        steps = min(sample.output.max_tokens - sample.num_computed for sample in among)
        return min(max(RETRY_SECONDS, steps * self._cost.seconds(size)), MOST_RETRY_SECONDS)
