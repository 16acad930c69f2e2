"""The loop of the engine's thread over scripted workers: it is one step ahead, unless it must know tokens first."""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.request.events import Delta, Event, Finished
from tk.infer.engine.schedule.live_request import LiveRequest
from tk.infer.engine.schedule.live_table import LiveTable
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step_loop import StepLoop
from tk.infer.engine.worker.draft_model import DraftModel
from tk.infer.engine.worker.worker_group import WorkerGroup
from tk.tests.infer.engine.schedule.test_live_request import live
from tk.tests.infer.engine.schedule.test_step_in_flight import OneToken


class Watch:
    """A watch that sees nothing."""

    def begin(self, predict: Callable[[], float]) -> None:
        assert predict() >= 0

    def rest(self) -> None:
        pass


class Workers:
    """Workers that choose token 5 for each row, and a record of the calls."""

    def __init__(self, candidates: list[int] | None = None) -> None:
        self.watch = Watch()
        self.seen: list[str] = []
        self.tokens: list[list[int]] = []
        self._candidates = candidates

    def send(self, message: bytes) -> None:
        self.seen.append("send")

    def receive(self) -> SamplerOutput:
        self.seen.append("receive")
        candidates = None if self._candidates is None else np.array([self._candidates], np.int32)
        return SamplerOutput.of_tokens(np.array([5], np.int32), np.ones(1, np.uint8), candidates)

    def send_tokens(self, tokens: np.ndarray[Any, Any], are_chosen: bool = False) -> None:
        self.tokens.append(tokens.tolist())

    def send_masks(self, masks: np.ndarray[Any, Any]) -> None:
        self.seen.append("masks")

    def sample_again(self, rows: np.ndarray[Any, Any], masks: np.ndarray[Any, Any]) -> None:
        self.seen.append("again")

    def sleep(self) -> None:
        self.seen.append("sleep")


def loop_of(workers: Workers, *requests: LiveRequest) -> tuple[StepLoop, LiveTable]:
    table = LiveTable(Scheduler(Limits(4, 8, 64, 20), 16, 2), threading.Lock())
    for number, request in enumerate(requests):
        request.request = replace(request.request, request_id=str(number))
        for sample in request.samples:
            sample.request = request.request
        table.add(request)
    return StepLoop(table, cast(WorkerGroup, workers)), table


def test_a_step_is_sent_before_the_results_of_the_one_before_are_known() -> None:
    workers, events = Workers(), list[Event]()
    loop, table = loop_of(workers, live(events, max_new_tokens=3))
    while len(table):
        assert loop.turn()
    assert workers.seen == ["send", "send", "receive", "send", "receive", "receive"]
    assert [event.token_ids for event in events if isinstance(event, Delta)] == [(5,)] * 3
    assert any(isinstance(event, Finished) for event in events)
    assert loop.turn()
    assert workers.seen[-1] == "sleep"
    table.close()
    assert not loop.turn()


class Recorded(list[Event]):
    """Events, of which those with tokens are recorded among the calls of workers."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def append(self, event: Event) -> None:
        super().append(event)
        self._seen += ["event"] * isinstance(event, Delta)


def test_events_are_sent_while_the_draft_computes() -> None:
    workers = Workers()

    def fill(planned: list[Any], meanwhile: Callable[[], object]) -> list[Any]:
        workers.seen.append("draft")
        meanwhile()
        return planned

    loop, table = loop_of(workers, live(Recorded(workers.seen), max_new_tokens=3))
    loop.draft = cast(DraftModel, SimpleNamespace(fill=fill, seconds=0.0))
    table.await_tokens = lambda: True  # type: ignore[method-assign]
    while len(table):
        assert loop.turn()
    between = ["receive", "draft", "event", "send"]
    assert workers.seen == ["draft", "send", *between, *between, "receive", "event", "sleep"]


def test_a_request_whose_logits_are_not_finite_fails_alone() -> None:
    workers, events = Workers(), list[Event]()
    loop, table = loop_of(workers, live(events))
    receive = workers.receive
    workers.receive = lambda: replace(receive(), finite=np.zeros(1, np.uint8))  # type: ignore[method-assign]
    while len(table):
        loop.turn()
    assert "are not finite" in str(getattr(events[-1], "error", None))


def constrained(token: int, events: list[Event]) -> LiveRequest:
    """A request whose constraint allows one token, found among candidates."""
    request = live(events, max_new_tokens=1)
    output = request.samples[0].output
    output.matcher, output.has_candidates = cast(Matcher, OneToken(token)), True
    return request


def test_a_token_is_chosen_among_candidates_and_without_an_allowed_one_under_a_mask() -> None:
    for allowed, calls, token in ((7, ["send", "receive"], 7), (9, ["send", "receive", "again", "receive"], 5)):
        workers, events = Workers([6, 7]), list[Event]()
        loop, table = loop_of(workers, constrained(allowed, events))
        while len(table):
            loop.turn()
        assert workers.seen == calls
        assert workers.tokens == [[token]]
        assert [event.token_ids for event in events if isinstance(event, Delta)] == [(token,)]
