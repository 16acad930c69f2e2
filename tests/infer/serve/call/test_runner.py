"""The way of a request through the server, without a protocol: when it is admitted, what a refusal leaves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import Cancelled, InvalidRequest, Overloaded, TkError, UnknownAdapter
from tk.infer.engine.request.events import Delta, Finished, SentEvent, Started
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve.access.tokens import Caller
from tk.infer.serve.call.call import RequestRunner
from tk.infer.serve.errors import Draining, DuplicateRequest, Loading
from tk.infer.serve.metrics.statistics import RequestStatistics
from tk.infer.serve.operations.lifecycle import Lifecycle
from tk.tests.infer.serve.fake_engine import FakeEngine, delta, started

ALICE = Caller("alice", weight=3.0)


def asked(**options: Any) -> Request:
    fields: dict[str, Any] = {"prompt": "hi", "params": SamplingParams(), "request_id": "any"}
    return Request(**fields | options)


class Visit:
    """A runner whose server has loaded the model, and the ids that it admitted."""

    def __init__(self, engine: FakeEngine) -> None:
        self.lifecycle = Lifecycle()
        self.runner = RequestRunner(engine, self.lifecycle, default_max_new_tokens=9)
        self.admitted: list[str] = []

    async def events(self, request: Request) -> list[SentEvent]:
        async with self.runner.run(request, ALICE) as stream:
            self.admitted.append(request.request_id)
            return [event async for event in stream]

    async def refusal(self, request: Request, kind: type[TkError]) -> None:
        before = len(self.admitted), len(self.runner.live)
        with pytest.raises(kind):
            await self.events(request)
        assert (len(self.admitted), len(self.runner.live)) == before


def test_a_request_is_admitted_by_the_engine_first(engine: FakeEngine) -> None:
    async def run() -> None:
        visit = Visit(engine)
        await visit.refusal(asked(), Loading)
        visit.lifecycle.set_loaded()
        engine.refusal = Overloaded("full")
        await visit.refusal(asked(request_id="x"), Overloaded)
        engine.refusal = None
        assert [type(event) for event in await visit.events(asked(request_id="x"))] == [Started, Delta, Finished]
        assert visit.admitted == ["x"]
        await visit.refusal(asked(request_id="a b"), InvalidRequest)
        await visit.refusal(asked(prompt=[]), InvalidRequest)
        visit.lifecycle.set_draining()
        await visit.refusal(asked(), Draining)

    asyncio.run(run())
    made = engine.requests[-1]
    assert (made.prompt, made.key, made.weight) == ((1, 104, 105), ("alice", "x"), 3.0)
    assert made.params.max_new_tokens == 9


def test_an_answer_that_could_pass_the_limit_of_a_message_is_not_computed(engine: FakeEngine) -> None:
    async def run() -> None:
        visit = Visit(engine)
        visit.lifecycle.set_loaded()
        assert engine.tokenizer is not None
        engine.tokenizer.longest_token_bytes = 1 << 16
        many = SamplingParams(max_new_tokens=100, n=16)
        await visit.refusal(asked(params=many, at_once=True), InvalidRequest)
        assert engine.requests == []
        assert await visit.events(asked(params=many, at_once=False))

    asyncio.run(run())


def test_who_leaves_and_what_an_operator_ends_ends_in_the_engine(engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]

    async def run() -> None:
        visit = Visit(engine)
        visit.lifecycle.set_loaded()
        async with visit.runner.run(asked(request_id="left"), ALICE) as stream:
            assert isinstance(await anext(stream), Started)
            await visit.refusal(asked(request_id="left"), DuplicateRequest)
            assert not visit.runner.abort("left", "bob")
        async with visit.runner.run(asked(request_id="ended"), ALICE) as stream:
            assert visit.runner.abort("ended", "alice")
            with pytest.raises(Cancelled):
                async for _ in stream:
                    pass
        assert await visit.runner.live.wait_empty(20)

    asyncio.run(run())
    engine.settle()
    assert engine.num_live == 0
    assert set(engine.aborted) == {"left", "ended"}


def test_requests_that_the_engine_takes_pass_the_observer_once(engine: FakeEngine) -> None:
    statistics = RequestStatistics()

    async def run() -> None:
        visit = Visit(engine)
        visit.runner.observer = statistics
        visit.lifecycle.set_loaded()
        await visit.refusal(asked(prompt=[]), InvalidRequest)
        await visit.events(asked())

    asyncio.run(run())
    assert statistics.rejections == {}, "the log of calls counts them"
    assert statistics.successes == {"length": 1}


def test_an_unknown_adapter_is_an_error_with_those_that_the_caller_may_use(engine: FakeEngine) -> None:
    for name in ("sql", "legal"):
        engine.adapters.load(name, Path("/one"))

    async def run() -> None:
        visit = Visit(engine)
        visit.lifecycle.set_loaded()
        for allowed, known in (({"sql", "gone"}, "'sql'."), ({"gone"}, "none."), (None, "'sql', 'legal'.")):
            caller = Caller("alice", adapters=None if allowed is None else frozenset(allowed))
            with pytest.raises(UnknownAdapter) as caught:
                async with visit.runner.run(asked(adapter="gone"), caller):
                    pass
            assert (
                str(caught.value)
                == f"Adapter 'gone' is not loaded; loaded are: {known} Load it first, or name another."
            )
            assert caught.value.__suppress_context__, "the engine's error names all"

    asyncio.run(run())
