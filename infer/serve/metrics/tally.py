"""The counts and latencies of a server's requests.

The engine's thread counts, with a clock reading and a bisection per event; a reader on another thread sees each number
as it was a moment ago. Refusals are counted on the event loop's thread.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from ...engine.request.events import Delta, Done, Event, Failed, Finished, Timing
from ...engine.request.request import Request
from . import catalog
from .observer import Observer, OnEvent
from .request_record import RequestRecord

MOST_PRINCIPALS: Final = 100  # that have series of their own
OTHER_PRINCIPALS: Final = "(other)"
NO_PRINCIPAL: Final = "(none)"  # without --tokens, or without a valid token
Clock = Callable[[], float]


class LatencyCounts:
    """The numbers of observed times between bounds.

    Args:
        bounds: the upper bounds in seconds, ascending; a bound belongs to the times below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a time."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._sum += seconds

    def read(self) -> tuple[list[int], float]:
        """Returns how many times are at most each bound, the last number being that of all, and their sum."""
        return list(accumulate(self._counts)), self._sum


class PrincipalCounts:
    """The counts of a bounded number of principals: the first that call. Later ones are counted as one.

    Attributes:
        requests: the requests that the engine took and that have ended, by principal.
        prompt_tokens: the tokens of their prompts.
        new_tokens: the tokens of their answers that were sent.
        refused: the calls that were refused before.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.new_tokens: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def label_of(self, principal: str) -> str:
        """Returns the label of a principal; those in parentheses are no principal's name."""
        if not principal:
            return NO_PRINCIPAL
        if len(self._names) < MOST_PRINCIPALS:
            self._names.add(principal)
        return principal if principal in self._names else OTHER_PRINCIPALS

    def count(self, record: RequestRecord) -> None:
        """Counts a request that has ended."""
        label = self.label_of(record.principal)
        self.requests[label] += 1
        self.prompt_tokens[label] += record.values.get("prompt_tokens", 0)
        self.new_tokens[label] += record.values.get("completion_tokens", 0)


class RequestTally(Observer):
    """Counts the requests of one server.

    Attributes:
        latencies: the latencies by the metrics of the catalog.
        successes: the completed samples by finish reason.
        failures: the requests that failed in the engine, by the name of their status.
        rejections: the calls refused before, by the name of their status.
        principals: the counts of each caller.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        histograms = (catalog.FIRST_TOKEN, catalog.BETWEEN_TOKENS, catalog.END_TO_END, catalog.QUEUE_TIME)
        self.latencies = {metric: LatencyCounts(metric.bounds) for metric in histograms}
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.principals = PrincipalCounts()

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        return _Watched(self, on_event).on_event

    def refuse(self, record: RequestRecord) -> None:
        self.rejections[record.status] += 1
        self.principals.refused[self.principals.label_of(record.principal)] += 1

    def end(self, record: RequestRecord) -> None:
        if record.admitted is not None:
            self.principals.count(record)


class _Watched:
    """A request that is counted while its events pass."""

    __slots__ = ("_between", "_clock", "_last", "_next", "_submitted", "_tally", "_timing")

    def __init__(self, tally: RequestTally, on_event: OnEvent) -> None:
        self._tally, self._next = tally, on_event
        self._clock, self._between = tally.clock, tally.latencies[catalog.BETWEEN_TOKENS].observe
        self._submitted = tally.clock()
        self._last: dict[int, float] = {}  # the time of the newest tokens of each sample
        self._timing: Timing | None = None

    def on_event(self, event: Event) -> None:
        if type(event) is Delta:  # nearly all events are
            self._count_tokens(event.index)
        elif isinstance(event, Finished):
            self._timing = event.timing
            self._tally.successes[event.reason.value] += 1
        elif isinstance(event, Done):
            self._count_completed()
        elif isinstance(event, Failed):
            self._tally.failures[event.error.grpc_status] += 1
        self._next(event)

    def _count_tokens(self, index: int) -> None:
        now = self._clock()
        if (last := self._last.get(index)) is not None:
            self._between(now - last)
        elif not self._last:
            self._tally.latencies[catalog.FIRST_TOKEN].observe(now - self._submitted)
        self._last[index] = now

    def _count_completed(self) -> None:
        latencies = self._tally.latencies
        latencies[catalog.END_TO_END].observe(self._clock() - self._submitted)
        if self._timing is not None:
            latencies[catalog.QUEUE_TIME].observe(self._timing.queue_seconds)
