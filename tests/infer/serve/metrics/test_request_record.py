"""The record of a call: tokens of several prompts, the first sample's times, and whether the engine took a request."""

import time

from tk.core.errors import Overloaded
from tk.infer.engine.request.events import Delta, Finished, FinishReason, Started, Timing, Usage
from tk.infer.serve.metrics.request_record import RequestRecord, RequestTerms


def test_tokens_of_all_prompts_are_added() -> None:
    record = RequestRecord("Generate", "alice", "x")
    record.see(Started("x-0", 7, 2, seed=1, step=40))
    record.see(Delta(0, "ab", (1, 2)))
    record.see(Started("x-1", 5, 0, seed=1, step=40))
    record.see(Delta(0, "c", (3,)))
    for queue_seconds in (0.5, 0.25):
        timing = Timing(queue_seconds, 1.0, 2.0, preemptions=0)
        record.see(Finished(0, FinishReason.LENGTH, Usage(7, 2, 2), timing))
    assert record.values == {
        "prompt_tokens": 12,
        "cached_tokens": 2,
        "completion_tokens": 3,
        "queue_seconds": 0.5,
        "first_token_seconds": 1.0,
    }
    assert (record.progress.step, record.progress.reasons, record.progress.preemptions) == (40, ["length", "length"], 0)


def test_a_call_is_refused_until_the_engine_takes_its_request() -> None:
    record = RequestRecord("Generate", error=Overloaded("full"))
    assert record.is_refused
    record.admit("x")
    assert (record.request_id, record.is_refused) == ("x", False)
    assert not RequestRecord("Generate", error=KeyError("a defect")).is_refused


def test_a_call_is_late_from_its_deadline_on() -> None:
    assert RequestRecord("Generate", terms=RequestTerms(deadline=time.monotonic())).is_late
    assert not RequestRecord("Generate", terms=RequestTerms(deadline=time.monotonic() + 1e6)).is_late
    assert not RequestRecord("Generate").is_late
