"""Unexpected exceptions in the engine: a traceback in the log, an error that names them for every request, no hang."""

import logging
import queue
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import TkError, WorkerDied
from tk.infer import LLM, SamplingParams
from tk.infer.engine import step_loop
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.request.events import Event, Failed, Started
from tk.infer.engine.request.request import Request
from tk.infer.engine.schedule.live_request import LiveRequest
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_in_flight import StepInFlight
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.worker import processes
from tk.infer.engine.worker.processes import WorkerProcesses
from tk.infer.engine.worker.worker_group import WorkerGroup

SHORT = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
PLACES: dict[str, tuple[Any, str]] = {
    "plan": (Scheduler, "schedule"),
    "write": (step_loop, "prepare_step"),
    "send": (WorkerGroup, "send"),
    "masks": (StepInFlight, "masks"),
    "receive": (WorkerGroup, "receive"),
    "token": (LiveRequest, "add_token"),
    "events": (LiveRequest, "deliver"),
    "deadlines": (Scheduler, "expire"),
    "decode": (SamplerOutput, "decode"),
}
CHOICE = ("plan", "receive", "events")


@pytest.fixture
def loaded(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(model_folder("grouped"), kv_blocks=8, threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=() if place in CHOICE else pytest.mark.matrix) for place in PLACES]
)
def test_a_defect_in_the_engines_thread_is_logged_and_named(
    place: str, loaded: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.undo()  # once
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(*PLACES[place], broken)
    with pytest.raises(WorkerDied, match=r"The engine's thread .* failed by a defect of tk \(ZeroDivisionError\)"):
        loaded.generate([[1, 2, 3]], SHORT)
    with pytest.raises(WorkerDied, match="ZeroDivisionError"):
        loaded.generate([[1, 2, 3]], SHORT)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_an_error_of_tk_in_the_engines_thread_is_a_defect_with_its_traceback_in_the_log(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No worker has died of it: callers got WorkerDied, and the log had not a word."""

    def broken(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.undo()  # once
        raise TkError("injected")

    monkeypatch.setattr(*PLACES["plan"], broken)
    with pytest.raises(WorkerDied, match="injected"):
        loaded.generate([[1, 2, 3]], SHORT)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], TkError)


def test_a_panic_of_a_library_in_rust_is_a_defect_like_any_other(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no Exception: requests were told that the engine was closed, and the log had not a word."""

    class PanicException(BaseException):
        pass

    def broken(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.undo()  # once
        raise PanicException("index out of bounds")

    monkeypatch.setattr(*PLACES[CHOICE[0]], broken)
    with pytest.raises(WorkerDied, match=r"failed by a defect of tk \(PanicException\)"):
        loaded.generate([[1, 2, 3]], SHORT)
    with pytest.raises(WorkerDied, match="PanicException"):
        loaded.generate([[1, 2, 3]], SHORT)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], PanicException)


def test_a_defect_in_the_thread_of_the_processes_is_no_hang(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only errors of the system were passed on: the engine waited for ever for processes that were not started."""

    def broken(*arguments: Any, **keywords: Any) -> subprocess.Popen[bytes]:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(processes, "start_module", broken)
    with pytest.raises(WorkerDied, match="ZeroDivisionError"):
        LLM(model_folder("grouped"), kv_blocks=8)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_defect_of_a_worker_is_named_and_its_traceback_is_in_the_log(
    model_folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(model_folder("grouped"), kv_blocks=8)
    workers = WorkerProcesses(1, 1, "tk.tests.infer.engine.worker.broken_worker")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with closing(Engine.start(options, processes=workers)) as engine:
        engine.submit(Request((1, 2), SHORT, "a"), events.put)
        started, failed = (events.get(timeout=60) for _ in range(2))
    assert isinstance(started, Started)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, WorkerDied)
    assert str(failed.error).startswith("An inference worker (process ")
    assert "failed by a defect of tk (ZeroDivisionError)" in str(failed.error)
    assert "Traceback" in capfd.readouterr().err
