"""`AsyncClient` against a real server over a scripted engine; `Client`'s tests show the errors, which are the same."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from tk.core.errors import InvalidRequest, Overloaded, WorkerDied
from tk.infer.client import connection
from tk.infer.client.client import AsyncClient
from tk.infer.client.connection import Unavailable
from tk.infer.engine.request.events import Delta, Done, Finished, Started
from tk.infer.engine.request.request import CacheOptions, Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.fake_engine import INFO, FakeEngine, ServerThread, delta, finished, started

Work = Callable[[AsyncClient], Awaitable[Any]]


@pytest.fixture
def run(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], Any]:
    """Runs a coroutine function with a client, on an event loop of its own."""
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(connection, "LONGEST_PAUSE_SECONDS", 0.02)

    async def connected(work: Work) -> Any:
        async with AsyncClient(server.target, timeout=20) as client:
            return await work(client)

    return lambda work: asyncio.run(connected(work))


def test_many_prompts_at_a_time_come_back_in_order(run: Callable[[Work], Any], engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta(bytes(request.token_ids[1:]).decode()), finished(), Done()]
    prompts = [f"prompt {number}" for number in range(100)]
    completions = run(lambda client: client.generate(prompts, SamplingParams(seed=3), CacheOptions(salt="s")))
    assert [completion.text for completion in completions] == prompts
    assert {request.cache.salt for request in engine.requests} == {"s"}


def test_all_events_or_only_the_deltas(run: Callable[[Work], Any]) -> None:
    async def both(client: AsyncClient) -> tuple[list[type], str]:
        kinds = [type(event) async for event in client.events("hi")]
        return list(dict.fromkeys(kinds)), "".join([one.text async for one in client.stream("hi")])

    assert run(both) == ([Started, Delta, Finished], "abc")


def test_leaving_a_stream_or_cancelling_a_task_ends_the_request(run: Callable[[Work], Any], engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]

    async def leave(client: AsyncClient) -> None:
        async with aclosing(client.stream("hi")) as deltas:
            async for _ in deltas:
                break
        await asyncio.to_thread(engine.wait_for, lambda e: len(e.aborted) == 1)
        task = asyncio.create_task(client.generate("hi"))
        await asyncio.to_thread(engine.wait_for, lambda e: len(e.requests) == 2)
        task.cancel()
        await asyncio.to_thread(engine.wait_for, lambda e: len(e.aborted) == 2)

    run(leave)
    engine.wait_for(lambda e: e.num_live == 0)


def test_if_one_prompt_fails_the_others_end(run: Callable[[Work], Any], engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]

    async def fail(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequest):
            await client.generate([[1], []])  # no prompt may be empty

    run(fail)
    engine.wait_for(lambda e: e.num_live == 0)


@pytest.mark.parametrize("refusal", [WorkerDied("gone"), Overloaded("full", 0.001)])
def test_refused_calls_are_repeated(run: Callable[[Work], Any], engine: FakeEngine, refusal: Exception) -> None:
    attempts: list[Request] = []

    def recovering(request: Request, on_event: Any) -> None:
        attempts.append(request)
        if len(attempts) % 3:
            raise refusal
        FakeEngine.submit(engine, request, on_event)

    engine.submit = recovering  # type: ignore[method-assign]

    async def both(client: AsyncClient) -> tuple[str, str]:
        [completion] = await client.generate("hi")
        return completion.text, "".join([one.text async for one in client.stream("hi")])

    assert run(both) == ("abc", "abc")
    assert len(attempts) == 6


def test_a_stream_that_has_begun_is_not_repeated(run: Callable[[Work], Any], engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]

    async def read(client: AsyncClient) -> None:
        async for _ in client.stream("hi"):
            engine.die()

    with pytest.raises(Unavailable):
        run(read)
    assert len(engine.requests) == 1


def test_model_info_and_tokenizer(run: Callable[[Work], Any]) -> None:
    async def all_of_them(client: AsyncClient) -> tuple[Any, ...]:
        return await client.model_info(), await client.tokenize("h"), await client.detokenize([104])

    assert run(all_of_them) == (INFO, [1, 104], "h")
