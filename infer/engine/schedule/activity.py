"""The tokens that an engine computes: since its start, and per second of the last few."""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from .samples.sample import Source

WINDOW_SECONDS: Final = 10


class Activity:
    """Counts of tokens. Not thread-safe: the engine's lock guards it.

    Attributes:
        num_prompt: the prompt tokens of all requests that were admitted.
        num_cached: how many of them the prefix cache had.
        num_new: the new tokens.
        num_preempted: how often a sample lost its blocks to others.
        proposed, accepted: the proposals that were computed, and those that came true, by their sources.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_prompt = self.num_cached = self.num_new = self.num_preempted = 0
        self.proposed: Counter[Source] = Counter()
        self.accepted: Counter[Source] = Counter()
        self._clock = clock
        self._begun = clock()
        # Seconds, and the prompt tokens and new tokens in each; never empty.
        self._seconds: deque[list[int]] = deque([[int(self._begun), 0, 0]])

    def admit(self, num_prompt: int, num_cached: int) -> None:
        """Counts the prompt of a request that runs for the first time."""
        self.num_prompt += num_prompt
        self.num_cached += num_cached

    def step(self, num_prompt: int) -> None:
        """Counts the prompt tokens of a step, and lets `new_token` count for the same second."""
        second = int(self._clock())
        if self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        while self._seconds[0][0] <= second - WINDOW_SECONDS:
            self._seconds.popleft()
        self._seconds[-1][1] += num_prompt

    def propose(self, source: Source, count: int) -> None:
        """Counts proposals of a step."""
        if count:
            self.proposed[source] += count

    def accept(self, source: Source) -> None:
        """Counts a proposal that came true."""
        self.accepted[source] += 1

    def new_token(self) -> None:
        """Counts a new token of the step before."""
        self.num_new += 1
        self._seconds[-1][2] += 1

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that the prefix cache had, 0 to 1."""
        return self.num_cached / self.num_prompt if self.num_prompt else 0.0

    def rates(self) -> tuple[float, float]:
        """Returns the prompt tokens and the new tokens per second of the last ten, or since a later start."""
        now = self._clock()
        first = int(now) - WINDOW_SECONDS + 1
        seconds = max(now - max(first, self._begun), 1.0)
        recent = [each for each in self._seconds if each[0] >= first]
        return sum(each[1] for each in recent) / seconds, sum(each[2] for each in recent) / seconds
