"""The switch over scripted engines: who answers what, how many engines live, what a refusal and a death change."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tk.core.errors import Cancelled, ConfigError, TkError, WorkerDied
from tk.infer.engine.request.events import Done, Event, Failed, ModelInfo
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.errors import CannotReload, Draining
from tk.infer.serve.operations.model_switch import ModelSwitch
from tk.tests.infer.serve.fake_engine import INFO, WAIT_SECONDS, FakeEngine, delta, started, whole_answer


class StepEngine(FakeEngine):
    """The engine of one step, which answers its own warm-up and leaves other requests open."""

    def __init__(self, step: int) -> None:
        super().__init__(info=replace(INFO, step=step))
        self.script = lambda request: whole_answer(request) if request.cache.bypass else [started(request)]
        self.loaded, self.is_closed = threading.Event(), False
        self.error: TkError | None = None

    def wait_ready(self) -> None:
        assert self.loaded.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        if self.is_closed:
            raise Cancelled("closed")

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.loaded.set()
        for principal, request_id in list(self._sinks):
            self.emit((principal, request_id), Failed(Cancelled("closed")))
        self.settle()

    def kill(self) -> None:
        super().kill()
        self.error = WorkerDied("killed")
        self.loaded.set()

    def finish(self, request_id: str) -> None:
        self.emit(request_id, delta("x"), Done())


class Bench:
    """A switch, its engines by step, and reloads on threads."""

    def __init__(self) -> None:
        self.engines = {1: StepEngine(1)}
        self.engines[1].loaded.set()
        self.refusals: dict[int, Exception] = {}
        self.most = 0
        self.switch = ModelSwitch(self.engines[1], self._begin)
        self.threads = ThreadPoolExecutor(8)

    def _begin(self, running: StepEngine, path: Path) -> StepEngine | None:
        step = int(path.name)
        if step in self.refusals:
            raise self.refusals[step]
        if running.info.step == step:
            return None
        self.engines[step] = StepEngine(step)
        self.most = max(self.most, sum(not engine.is_closed for engine in self.engines.values()))
        return self.engines[step]

    def reload(self, step: int) -> "Future[ModelInfo]":
        """Begins a reload, and returns when it loads or waits."""
        future = self.threads.submit(self.switch.reload, Path(str(step)))
        wait_until(lambda: future.done() or step in self.engines or self.switch._waiting is not None)
        return future

    def load(self, step: int) -> int:
        """Carries out a whole reload; returns the step that it reports."""
        future = self.reload(step)
        wait_until(lambda: step in self.engines)
        self.engines[step].loaded.set()
        return future.result(WAIT_SECONDS).step

    def ask(self, request_id: str, adapter: str = "") -> list[Event]:
        events: list[Event] = []
        self.switch.submit(Request((1,), SamplingParams(), request_id, adapter=adapter), events.append)
        return events


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.switch.close()
    bench.threads.shutdown()
    for engine in bench.engines.values():
        FakeEngine.close(engine)


def test_a_request_ends_on_the_engine_that_it_began_with(bench: Bench) -> None:
    old = bench.ask("old")
    assert bench.load(2) == 2
    new = bench.ask("new")
    assert bench.switch.info.step == 2
    assert [request.request_id for request in bench.engines[1].requests] == ["old"]
    assert [request.request_id for request in bench.engines[2].requests][1:] == ["new"]
    assert not bench.engines[1].is_closed
    bench.engines[1].finish("old")
    wait_until(lambda: bench.engines[1].is_closed)
    assert isinstance(old[-1], Done)
    assert not isinstance(new[-1], Failed)
    assert bench.switch.abort("new")
    assert not bench.switch.abort("old")


def test_an_abort_finds_a_request_of_the_old_engine(bench: Bench) -> None:
    bench.ask("old")
    bench.load(2)
    assert bench.switch.abort("old")
    wait_until(lambda: bench.engines[1].is_closed)


def test_an_adapter_is_unloaded_when_its_last_request_of_the_old_engine_has_ended(bench: Bench) -> None:
    bench.switch.adapters.load("a", Path("/one"))
    bench.ask("old", "a")
    bench.load(2)
    bench.switch.adapters.load("a", Path("/two"))
    bench.ask("new", "a")
    info, unused = bench.switch.adapters.unload("a")
    assert info.sha256 == "sha256 of two", "that of the engine which answers"
    bench.engines[2].finish("new")
    wait_until(lambda: not bench.engines[2].adapters.table.in_slots)
    assert not unused.done()
    bench.engines[1].finish("old")
    unused.result(WAIT_SECONDS)


def test_at_most_two_engines_live_and_the_newest_reload_waits(bench: Bench) -> None:
    bench.ask("old")
    bench.load(2)
    third = bench.reload(3)
    fourth = bench.reload(4)
    with pytest.raises(CannotReload, match="newer reload"):
        third.result(WAIT_SECONDS)
    assert set(bench.engines) == {1, 2}
    bench.engines[1].finish("old")
    wait_until(lambda: 4 in bench.engines)
    assert bench.engines[1].is_closed
    bench.engines[4].loaded.set()
    assert fourth.result(WAIT_SECONDS).step == 4
    assert bench.most == 2


@pytest.mark.parametrize("error", [ConfigError("another model"), TkError("it does not fit")])
def test_a_refused_checkpoint_leaves_the_old_one(bench: Bench, error: TkError) -> None:
    bench.refusals[2] = error
    with pytest.raises(CannotReload, match=f"Step 1 serves on: {error}"):
        bench.switch.reload(Path("2"))
    assert bench.switch.info.step == 1
    assert bench.load(3) == 3


def test_damage_found_while_loading_leaves_the_old_one_and_closes_the_new(bench: Bench) -> None:
    future = bench.reload(2)
    bench.engines[2].error = TkError("a flipped bit")
    bench.engines[2].loaded.set()
    with pytest.raises(CannotReload, match="flipped"):
        future.result(WAIT_SECONDS)
    assert (bench.engines[2].is_closed, bench.switch.info.step) == (True, 1)


def test_weights_that_cannot_answer_are_refused(bench: Bench) -> None:
    future = bench.reload(2)
    bench.engines[2].script = lambda request: [Failed(TkError("logits are not finite"))]
    bench.engines[2].loaded.set()
    with pytest.raises(CannotReload, match="not finite"):
        future.result(WAIT_SECONDS)
    assert (bench.engines[2].is_closed, bench.switch.info.step) == (True, 1)


def test_a_worker_that_dies_while_it_loads_is_reported_as_such(bench: Bench) -> None:
    future = bench.reload(2)
    bench.engines[2].error = WorkerDied("killed by signal 9")
    bench.engines[2].loaded.set()
    with pytest.raises(WorkerDied):
        future.result(WAIT_SECONDS)
    assert bench.switch.info.step == 1


def test_the_served_checkpoint_is_not_loaded_again(bench: Bench) -> None:
    assert bench.switch.reload(Path("1")).step == 1
    assert bench.load(2) == 2


def test_the_end_of_reloads_ends_the_loading_engine_alone(bench: Bench) -> None:
    events = bench.ask("live")
    first = bench.reload(2)
    waiting = bench.reload(3)
    bench.switch.end_reloads()
    for future in (first, waiting):
        with pytest.raises(Draining):
            future.result(WAIT_SECONDS)
    with pytest.raises(Draining):
        bench.switch.reload(Path("4"))
    assert (bench.engines[2].is_closed, bench.engines[1].is_closed) == (True, False)
    bench.engines[1].finish("live")
    bench.engines[1].settle()
    assert isinstance(events[-1], Done)


def test_only_deaths_of_the_current_engine_are_reported(bench: Bench) -> None:
    reports: list[WorkerDied | None] = []
    bench.switch.watch(reports.append)
    lost = bench.ask("lost")
    bench.load(2)
    bench.engines[1].die()
    wait_until(lambda: bench.engines[1].is_closed)
    assert isinstance(lost[-1], Failed)
    assert reports == []
    bench.engines[2].die(retry_after=1.0)
    bench.engines[2].settle()
    assert [type(report) for report in reports] == [WorkerDied]
    late: list[WorkerDied | None] = []
    bench.switch.watch(late.append)
    assert late == reports
    bench.load(3)
    assert reports[1:] == [None], "a new engine takes the place of the dead one"


def test_callbacks_after_events_run_for_every_engine(bench: Bench) -> None:
    names: list[str] = []
    bench.switch.after_events(lambda: names.append(threading.current_thread().name))
    bench.ask("old")
    bench.load(2)
    bench.ask("new")
    for engine in (bench.engines[1], bench.engines[2]):
        engine.settle()
    assert len(set(names)) == 2


def test_no_request_is_lost_while_engines_change(bench: Bench) -> None:
    """Requests are submitted all the time; each ends once, in the engine that has it."""
    ends: list[Event] = []
    over = threading.Event()

    def record(event: Event) -> None:
        if isinstance(event, Done | Failed):
            ends.append(event)

    def submit() -> int:
        number = 0
        while not over.is_set():
            number += 1
            bench.switch.submit(Request((1,), SamplingParams(), f"r{number}"), record)
            time.sleep(0.0005)
        return number

    for engine in bench.engines.values():
        engine.script = whole_answer
    submitting = bench.threads.submit(submit)
    for step in range(2, 22):
        future = bench.reload(step)
        wait_until(lambda step=step: step in bench.engines)  # type: ignore[misc]
        bench.engines[step].script = whole_answer
        bench.engines[step].loaded.set()
        future.result(WAIT_SECONDS)
    over.set()
    count = submitting.result(WAIT_SECONDS)
    wait_until(lambda: len(ends) == count)
    assert all(isinstance(event, Done) for event in ends)
    assert bench.most == 2


def test_close_ends_both_engines(bench: Bench) -> None:
    old = bench.ask("old")
    bench.load(2)
    bench.switch.close()
    assert bench.engines[1].is_closed
    assert bench.engines[2].is_closed
    assert isinstance(old[-1], Failed)


def test_a_defect_in_a_reload_is_passed_on_and_the_next_one_has_its_turn(bench: Bench) -> None:
    """The next one waited for ever."""
    bench.refusals[2] = ZeroDivisionError("a defect")
    with pytest.raises(ZeroDivisionError):
        bench.reload(2).result(WAIT_SECONDS)
    reload = bench.reload(3)
    wait_until(lambda: 3 in bench.engines)
    bench.engines[3].loaded.set()
    assert reload.result(WAIT_SECONDS).step == 3
