"""Engines of other steps: what they share with the running one, and what goes with an old one."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk.core.errors import CheckpointError, ConfigError
from tk.infer.engine.engine import Engine
from tk.infer.engine.grammar.grammar import Constraint
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.model_source import ModelSource
from tk.infer.engine.request.events import Done, Event, Failed
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.operations import next_engine
from tk.infer.serve.operations.model_switch import ModelSwitch
from tk.infer.serve.operations.next_engine import begin_beside
from tk.tests.infer.adapters import make_adapter
from tk.tests.infer.serve.forced_steps import save_forced_step
from tk.tests.infer.serve.tiny_model import write_tiny_model

WAIT_SECONDS = 60.0
DIGITS = Constraint("regex", "[0-9]{1,9}")


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def answer(switch: ModelSwitch[Engine], name: str) -> Event:
    """The last event of a request with a constraint."""
    over, events = threading.Event(), list[Event]()

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, Done | Failed):
            over.set()

    switch.submit(Request((1,), SamplingParams(max_new_tokens=3, regex=DIGITS.text), name), on_event)
    assert over.wait(WAIT_SECONDS)
    return events[-1]


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_engine_that_has_ended_leaves_nothing_and_its_grammars_serve_on(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    steps = [save_forced_step(tmp_path / "run", model, step) for step in (1, 2, 3)]
    options = EngineOptions(steps[0], kv_blocks=64, threads=1)
    with closing(ModelSwitch(Engine.start(options), begin_beside)) as switch:
        grammar, gone = switch.grammars.compile(DIGITS), list[weakref.ref[Any]]()
        assert isinstance(answer(switch, "first"), Done)
        for step in steps[1:]:
            old = switch._current  # the switch alone has it
            gone += [weakref.ref(each) for each in (old, old.source, old.source.checkpoint, old.statistics)]
            del old
            assert switch.reload(step).step == int(step.name[5:])
            assert isinstance(answer(switch, "after"), Done)
        deadline = time.monotonic() + WAIT_SECONDS
        while any(each() is not None for each in gone):
            assert time.monotonic() < deadline, [each() for each in gone]
            time.sleep(0.01)
        assert switch.grammars.compile(DIGITS) is grammar, "no second vocabulary, no second grammar"


def test_the_next_engine_has_the_adapters_of_the_running_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "model")
    first, second = (save_forced_step(tmp_path / "run", model, step) for step in (1, 2))
    paths = {"any": make_adapter(tmp_path / "any", model, identity=""), "fits": make_adapter(tmp_path / "fits", first)}
    source = ModelSource.open(EngineOptions(first, adapters=paths, max_adapters=3, kv_blocks=8))
    loaded = dict(source.adapters)
    running: Any = SimpleNamespace(
        source=replace(source, adapters={}, options=replace(source.options, adapters={})),
        adapters=SimpleNamespace(loaded=loaded),
        worker_process_ids=(),
        info=source.info,
    )
    with pytest.raises(CheckpointError, match="is an adapter of another base"):
        begin_beside(running, second)
    del loaded["fits"]
    loaded["changed"] = replace(loaded["any"], digest="of other bytes")
    with pytest.raises(ConfigError, match="The files of adapter 'changed' have changed"):
        begin_beside(running, second)
    del loaded["changed"]
    monkeypatch.setattr(next_engine, "WorkerProcesses", lambda *arguments: None)
    monkeypatch.setattr(next_engine, "Engine", lambda source, processes: source)
    begun: Any = begin_beside(running, second)
    assert (dict(begun.adapters), begun.info.max_adapters) == ({"any": loaded["any"]}, 3)
