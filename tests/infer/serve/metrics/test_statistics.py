"""The counts of requests, event by event, on a clock of the test."""

from tk.core.errors import Cancelled
from tk.infer.engine.request.events import Done, Event, Failed, FinishReason, Started
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.metrics.observer import Observer, OnEvent
from tk.infer.serve.metrics.request_record import RequestRecord
from tk.infer.serve.metrics.statistics import (
    MOST_NAMES,
    NO_PRINCIPAL,
    OTHER_NAMES,
    LatencyHistogram,
    RequestStatistics,
)
from tk.tests.clock import Clock
from tk.tests.infer.serve.fake_engine import delta, finished

REQUEST = Request((1, 2), SamplingParams(n=2), "r")


def begin(statistics: Observer) -> tuple[OnEvent, list[Event]]:
    events: list[Event] = []
    return statistics.begin(REQUEST, events.append), events


def times(counts: LatencyHistogram) -> tuple[int, float]:
    cumulative, total = counts.read()
    return cumulative[-1][1], round(total, 6)


def test_a_bound_belongs_to_the_times_below_it() -> None:
    counts = LatencyHistogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        counts.observe(seconds)
    assert counts.read() == ([("0.1", 2), ("1.0", 3), ("+Inf", 4)], 3.65)


def test_the_times_of_a_request_with_two_samples() -> None:
    clock = Clock()
    statistics = RequestStatistics(clock)
    on_event, events = begin(statistics)
    script: list[tuple[float, Event]] = [
        (0.5, Started("r", 2, 0, 1)),
        (0.5, delta("a", 0)),
        (0.0, delta("a", 1)),
        (0.25, delta("b", 0)),
        (0.0, delta("b", 1)),
        (0.25, finished(0, FinishReason.EOS)),
        (0.0, finished(1, FinishReason.LENGTH)),
        (0.0, Done()),
    ]
    for seconds, event in script:
        clock.now += seconds
        on_event(event)
    assert events == [event for _, event in script]
    assert times(statistics.first_token) == (1, 1.0)
    assert times(statistics.between_tokens) == (2, 0.5)
    assert times(statistics.end_to_end) == (1, 1.5)
    assert times(statistics.queue_time) == (1, 0.1)
    assert statistics.successes == {"eos": 1, "length": 1}
    assert not statistics.failures


def test_failures_and_refusals_are_counted_by_status() -> None:
    statistics = RequestStatistics()
    on_event, events = begin(statistics)
    on_event(Failed(Cancelled("aborted")))
    for _ in range(2):
        statistics.refuse(RequestRecord("Generate", status="RESOURCE_EXHAUSTED"))
    assert len(events) == 1
    assert statistics.failures == {"CANCELLED": 1}
    assert statistics.rejections == {"RESOURCE_EXHAUSTED": 2}
    assert times(statistics.end_to_end) == (0, 0.0)


def test_principals_have_labels_of_a_bounded_number() -> None:
    statistics = RequestStatistics()
    for number in range(MOST_NAMES + 50):
        record = RequestRecord("Generate", f"p{number}", values={"prompt_tokens": 3, "completion_tokens": 2})
        record.admit("x")
        statistics.end(record)
    statistics.end(RequestRecord("Generate", "p0"))  # the engine did not take it
    statistics.refuse(RequestRecord("Generate", "new"))
    statistics.refuse(RequestRecord("Generate", "p7"))
    statistics.refuse(RequestRecord("Generate"))
    counts = statistics.principals
    assert len(counts.requests) == MOST_NAMES + 1
    assert (counts.requests["p0"], counts.prompt_tokens["p0"], counts.new_tokens["p0"]) == (1, 3, 2)
    assert (counts.requests[OTHER_NAMES], counts.prompt_tokens[OTHER_NAMES]) == (50, 150)
    assert counts.refused == {OTHER_NAMES: 1, "p7": 1, NO_PRINCIPAL: 1}
