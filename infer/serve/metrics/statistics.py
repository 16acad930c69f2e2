"""The statistics of a server's requests: counts and latencies.

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
from .observer import Observer, OnEvent
from .request_record import RequestRecord

MOST_NAMES: Final = 100  # of principals, and of adapters, that have series of their own
OTHER_NAMES: Final = "(other)"
NO_PRINCIPAL: Final = "(none)"  # without --tokens, or without a valid token
# All of vLLM's bounds, in seconds, and more below them: small models are faster.
_FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
Clock = Callable[[], float]


class LatencyHistogram:
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

    def read(self) -> tuple[list[tuple[str, int]], float]:
        """Returns how many times are at most each bound, which is text, the last one being "+Inf", and their sum."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class NamedCounters:
    """The counts of a bounded number of principals, or adapters: the first that come. Later ones are counted as one.

    Attributes:
        requests: the requests that the engine took and that have ended, by name.
        prompt_tokens: the tokens of these requests' prompts.
        new_tokens: the tokens of their answers that were sent.
        refused: the calls that were refused before.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.new_tokens: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def label_of(self, name: str) -> str:
        """Returns the label of a name; those in parentheses are no principal's."""
        if not name:
            return NO_PRINCIPAL
        if len(self._names) < MOST_NAMES:
            self._names.add(name)
        return name if name in self._names else OTHER_NAMES

    def add(self, name: str, record: RequestRecord) -> None:
        """Counts a request that the engine took and that has ended."""
        label = self.label_of(name)
        self.requests[label] += 1
        self.prompt_tokens[label] += record.values.get("prompt_tokens", 0)
        self.new_tokens[label] += record.values.get("completion_tokens", 0)


class RequestStatistics(Observer):
    """Counts the requests of one server.

    Attributes:
        first_token: the times from submission to the first token.
        between_tokens: the times between two tokens of a sample.
        end_to_end: the times from submission to the last token of requests that completed.
        queue_time: the times that these waited to be computed.
        successes: the completed samples by finish reason.
        failures: the requests that failed in the engine, by the name of their status.
        rejections: the calls refused before, by the name of their status.
        principals, adapters: the counts of each caller, and of each adapter.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.first_token, self.between_tokens = LatencyHistogram(_FIRST_TOKEN_BOUNDS), LatencyHistogram(_TOKEN_BOUNDS)
        self.end_to_end, self.queue_time = LatencyHistogram(_REQUEST_BOUNDS), LatencyHistogram(_REQUEST_BOUNDS)
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.principals, self.adapters = NamedCounters(), NamedCounters()

    def begin(self, request: Request, on_event: OnEvent) -> OnEvent:
        return _CountedRequest(self, on_event).on_event

    def refuse(self, record: RequestRecord) -> None:
        self.rejections[record.status] += 1
        self.principals.refused[self.principals.label_of(record.principal)] += 1

    def end(self, record: RequestRecord) -> None:
        if record.progress.admitted is not None:
            self.principals.add(record.principal, record)
            if record.progress.adapter:
                self.adapters.add(record.progress.adapter, record)


class _CountedRequest:
    """A request that is counted while its events pass."""

    __slots__ = ("_between", "_clock", "_last", "_next", "_statistics", "_submitted", "_timing")

    def __init__(self, statistics: RequestStatistics, on_event: OnEvent) -> None:
        self._statistics, self._next = statistics, on_event
        self._clock, self._between = statistics.clock, statistics.between_tokens.observe
        self._submitted = statistics.clock()
        self._last: dict[int, float] = {}  # the time of the newest tokens of each sample
        self._timing: Timing | None = None

    def on_event(self, event: Event) -> None:
        if type(event) is Delta:  # nearly all events are
            self._count_tokens(event.index)
        elif isinstance(event, Finished):
            self._timing = event.timing
            self._statistics.successes[event.reason.value] += 1
        elif isinstance(event, Done):
            self._statistics.end_to_end.observe(self._clock() - self._submitted)
            if self._timing is not None:
                self._statistics.queue_time.observe(self._timing.queue_seconds)
        elif isinstance(event, Failed):
            self._statistics.failures[event.error.grpc_status] += 1
        self._next(event)

    def _count_tokens(self, index: int) -> None:
        now = self._clock()
        if (last := self._last.get(index)) is not None:
            self._between(now - last)
        elif not self._last:
            self._statistics.first_token.observe(now - self._submitted)
        self._last[index] = now
