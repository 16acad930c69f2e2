"""The live requests: what is refused and when, who ends them, and what they leave behind."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from tk.core.errors import Cancelled, DeadlinePassed, InvalidRequest, WorkerDied
from tk.infer.engine.request.adapter_lease import AdapterLease
from tk.infer.engine.request.events import Event, Failed
from tk.infer.engine.schedule.live_request import LiveRequest
from tk.infer.engine.schedule.live_table import LiveTable
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.clock import Clock
from tk.tests.infer.engine.schedule.test_live_request import live


def table() -> LiveTable:
    return LiveTable(Scheduler(Limits(4, 8, 64, 20), 16, 2), threading.Lock())


def named(name: str, events: list[Event] | None = None, deadline: float | None = None) -> LiveRequest:
    """A request with this name, which is its prompt too."""
    found = live(events, prompt=tuple(name.encode()))
    found.request = replace(found.request, request_id=name, deadline=deadline)
    for sample in found.samples:
        sample.request = found.request
    return found


def error_of(events: list[Event]) -> Exception:
    [failed] = events
    assert isinstance(failed, Failed)
    return failed.error


def test_an_id_is_taken_until_its_request_ends() -> None:
    requests, events = table(), list[Event]()
    requests.add(first := named("a", events))
    with pytest.raises(InvalidRequest, match="'a' belongs to a live request"):
        requests.add(named("a"))
    requests.fail(first, Cancelled("enough"))
    assert (str(error_of(events)), len(requests)) == ("enough", 0)
    requests.add(named("a"))
    requests.end(first)
    assert len(requests) == 1, "a later request has its id"


def test_requests_are_refused_with_the_death_of_a_worker_until_workers_start_again() -> None:
    requests, events = table(), list[Event]()
    requests.add(named("a", events))
    requests.fail_all(WorkerDied("rank 0 died", 2.5))
    assert isinstance(error_of(events), WorkerDied)
    with pytest.raises(WorkerDied, match="rank 0 died") as refused:
        requests.add(named("b"))
    assert refused.value.retry_after == 2.5
    requests.revive()
    requests.add(named("b"))
    assert len(requests) == 1


def test_after_a_close_nothing_is_planned_and_requests_are_refused() -> None:
    requests = table()
    requests.add(named("a"))
    requests.close()
    assert requests.schedule() is None
    with pytest.raises(Cancelled):
        requests.add(named("b"))


def test_the_engines_thread_ends_what_others_cancel_and_what_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("tk.infer.engine.schedule.live_table.time", SimpleNamespace(monotonic=clock))
    requests, cancelled, late = table(), list[Event](), list[Event]()
    calls: list[str] = []
    requests.after_events.append(lambda: calls.append("sent"))
    requests.end_unwanted()
    assert calls == []
    requests.add(named("a", cancelled))
    requests.add(named("b", late, clock.now + 1))
    assert not requests.cancel(("", "nothing"))
    assert requests.cancel(("", "a"))
    assert (cancelled, len(requests)) == ([], 2)
    clock.now += 2
    requests.end_unwanted()
    assert isinstance(error_of(cancelled), Cancelled)
    assert isinstance(error_of(late), DeadlinePassed)
    assert (calls, len(requests), requests.schedule()) == (["sent"], 0, [])


def test_a_step_has_the_request_of_each_chunk() -> None:
    requests = table()
    both = [named("a"), named("b")]
    for each in both:
        requests.add(each)
    planned = requests.schedule()
    assert planned is not None
    assert [(chunk.sample, request) for chunk, request in planned] == [(each.samples[0], each) for each in both]


def test_samples_of_one_adapter_stand_together_and_its_hold_ends_with_the_request() -> None:
    requests, released = LiveTable(Scheduler(Limits(4, 8, 64, 20), 16, 2), threading.Lock(), True), list[str]()
    for name, slot in (("a", 1), ("b", None), ("c", 0), ("d", 1)):
        found = named(name)
        lease = None if slot is None else AdapterLease(slot, "", partial(released.append, name))
        found.request = replace(found.request, lease=lease)
        for sample in found.samples:
            sample.request = found.request
        requests.add(found)
    planned = requests.schedule()
    assert planned is not None
    assert [request.request.request_id for _, request in planned] == ["b", "c", "a", "d"]
    for _, request in planned:
        requests.fail(request, Cancelled("enough"))
        requests.end(request)
    assert released == ["c", "a", "d"], "once each"
