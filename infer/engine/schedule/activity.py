"""The tokens that an engine computes: since its start, and per second of the last few."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .samples.sample import Source

WINDOW_SECONDS: Final = 10


@dataclass(slots=True)
class _Second:
    """The tokens of a second; proposals that a constraint forces are sure, and are counted as saved steps only."""

    number: int
    prompt: int = 0
    new: int = 0
    proposed: int = 0
    accepted: int = 0
    saved: int = 0


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
        self._seconds = deque([_Second(int(self._begun))])  # never empty

    def admit(self, num_prompt: int, num_cached: int) -> None:
        """Counts the prompt of a request that runs for the first time."""
        self.num_prompt += num_prompt
        self.num_cached += num_cached

    def step(self, num_prompt: int) -> None:
        """Counts the prompt tokens of a step, and lets `new_token` count for the same second."""
        second = int(self._clock())
        if self._seconds[-1].number != second:
            self._seconds.append(_Second(second))
        while self._seconds[0].number <= second - WINDOW_SECONDS:
            self._seconds.popleft()
        self._seconds[-1].prompt += num_prompt

    def propose(self, source: Source, count: int) -> None:
        """Counts proposals of a step."""
        if count:
            self.proposed[source] += count
            self._seconds[-1].proposed += count * (source is not Source.CONSTRAINT)

    def accept(self, source: Source) -> None:
        """Counts a proposal that came true."""
        self.accepted[source] += 1
        self._seconds[-1].accepted += source is not Source.CONSTRAINT
        self._seconds[-1].saved += 1

    def new_token(self) -> None:
        """Counts a new token of the step before."""
        self.num_new += 1
        self._seconds[-1].new += 1

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that the prefix cache had, 0 to 1."""
        return self.num_cached / self.num_prompt if self.num_prompt else 0.0

    def rates(self) -> tuple[float, float]:
        """Returns the prompt tokens and the new tokens per second of the last ten, or since a later start."""
        now = self._clock()
        first = int(now) - WINDOW_SECONDS + 1
        seconds = max(now - max(first, self._begun), 1.0)
        recent = [each for each in self._seconds if each.number >= first]
        return sum(each.prompt for each in recent) / seconds, sum(each.new for each in recent) / seconds

    def gains(self) -> tuple[float, float]:
        """Returns what proposals came to in the last ten seconds.

        They are the share of proposals that came true, of a draft or from the text of sequences, and the new tokens per
        step of a sequence: 1 without proposals, and 0 of both where there were none.
        """
        first = int(self._clock()) - WINDOW_SECONDS + 1
        recent = [each for each in self._seconds if each.number >= first]
        new, saved = sum(each.new for each in recent), sum(each.saved for each in recent)
        accepted, proposed = sum(each.accepted for each in recent), sum(each.proposed for each in recent)
        return accepted / max(1, proposed), new / max(1, new - saved)
