"""`AsyncLLM`: the same answers as `LLM` for many tasks at once; cancellation and closing free all that they held."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk.core.errors import Cancelled, ConfigError, InvalidRequest
from tk.infer import LLM, AsyncLLM, SamplingParams
from tk.infer.engine.engine import Engine
from tk.infer.engine.request.request import as_requests
from tk.tests.infer.engine.free_blocks import num_free_blocks

GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=600, ignore_eos=True)
PROMPTS = [[5, 6, i] for i in range(24)]
OPTIONS: dict[str, Any] = {"kv_blocks": 40, "block_size": 16, "max_batched_tokens": 48, "max_running": 24}


@pytest.fixture(scope="module")
def async_llm(model_folder: Callable[[str], Path]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model_folder("grouped"), **OPTIONS)
    asyncio.run(llm.start())
    yield llm
    asyncio.run(llm.close())


def check_nothing_is_held(llm: AsyncLLM) -> None:
    asyncio.run(llm.generate([1], GREEDY))  # steps after the abort
    assert llm.engine.statistics.check_cache().problems == ()
    assert (llm.engine.num_live, num_free_blocks(llm.engine)) == (0, llm.model_info().num_blocks)


async def tokens_of(deltas: AsyncIterator[Any]) -> tuple[int, ...]:
    return tuple([token async for delta in deltas for token in delta.token_ids])


def test_many_streams_at_once_give_the_tokens_of_llm(llm: LLM, async_llm: AsyncLLM) -> None:
    async def run() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(tokens_of(async_llm.stream(prompt, GREEDY)) for prompt in PROMPTS))

    expected = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    assert asyncio.run(run()) == expected
    assert [completion.token_ids for completion in asyncio.run(async_llm.generate(PROMPTS, GREEDY))] == expected
    check_nothing_is_held(async_llm)


def test_an_event_loop_is_woken_once_per_step(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice where a step also begins requests: their first events come before it, its tokens behind it."""
    wakeups: list[object] = []
    steps: list[object] = []
    workers = async_llm.engine._workers
    receive = workers.receive

    def received() -> object:
        steps.append(None)
        while len(steps) == 1 and async_llm.engine.num_live < len(PROMPTS):
            time.sleep(0.001)  # the loop's thread may stall between two requests
        return receive()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *arguments: Any) -> object:
            wakeups.append(callback)
            return call_soon(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await async_llm._complete(as_requests(PROMPTS, GREEDY, None))

    monkeypatch.setattr(workers, "receive", received)
    asyncio.run(run())
    assert len(steps) < 24 * len(PROMPTS) / 2, "many streams get a token of each step"
    assert 0 < len(wakeups) <= 2 * len(steps) + 2


def test_prompts_and_scores_are_those_of_llm(llm: LLM, async_llm: AsyncLLM) -> None:
    assert asyncio.run(async_llm.generate("abc on", GREEDY))[0].text == llm.generate("abc on", GREEDY)[0].text
    assert asyncio.run(async_llm.score("the", " error")) == llm.score("the", " error")
    many: list[list[int]] = [[1, 2, 3], [4]]
    assert asyncio.run(async_llm.score([7], many)) == llm.score([7], many)


def test_a_cancelled_task_ends_its_requests(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in async_llm.stream([1, 2], ENDLESS):
                begun.set()

        reading, waiting = asyncio.create_task(read()), asyncio.create_task(async_llm.generate(PROMPTS, ENDLESS))
        await begun.wait()
        for task in (reading, waiting):
            task.cancel()
        found = await asyncio.gather(reading, waiting, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in found)

    asyncio.run(run())
    check_nothing_is_held(async_llm)


def test_leaving_a_stream_early_ends_its_request(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        async with aclosing(async_llm.stream([1, 2], ENDLESS)) as deltas:
            async for _ in deltas:
                break

    asyncio.run(run())
    check_nothing_is_held(async_llm)


def test_an_event_loop_that_ends_leaves_no_request(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        deltas = async_llm.stream([1, 2], ENDLESS)
        await anext(deltas)
        kept.append(deltas)  # the iterator stays open when this coroutine ends

    kept: list[AsyncIterator[Any]] = []
    asyncio.run(run())
    check_nothing_is_held(async_llm)


def test_one_request_that_cannot_be_served_ends_all_of_its_call(async_llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="is not one of the vocabulary's"):
        asyncio.run(async_llm.generate([[1, 2], [1, 9999]], ENDLESS))
    check_nothing_is_held(async_llm)


def test_closing_ends_running_streams(model_folder: Callable[[str], Path]) -> None:
    async def run() -> tuple[int, ...]:
        async with AsyncLLM(model_folder("grouped"), **OPTIONS) as llm:
            streams = [llm.stream(prompt, ENDLESS) for prompt in PROMPTS[:4]]
            for stream in streams:
                await anext(stream)
            rest = asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
            await llm.close()
            assert all(isinstance(each, Cancelled) for each in await rest)
            with pytest.raises(Cancelled, match="closed"):
                await llm.generate([1])
        await llm.close()
        return llm.engine.worker_process_ids

    process_ids = asyncio.run(run())
    assert process_ids
    assert not any(Path(f"/proc/{process_id}").exists() for process_id in process_ids)


def test_the_model_is_loaded_once_and_before_it_is_used(async_llm: AsyncLLM) -> None:
    with pytest.raises(ConfigError, match="only once"):
        asyncio.run(async_llm.start())
    fresh = AsyncLLM("no/such/folder")
    with pytest.raises(ConfigError, match="not loaded"):
        asyncio.run(fresh.generate([1]))
    asyncio.run(fresh.close())


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_an_engine_without_a_waiting_task_is_closed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    go_on, closed, begun = threading.Event(), threading.Event(), threading.Event()

    def start(_: object) -> Any:
        begun.set()
        assert go_on.wait(20)
        return SimpleNamespace(close=closed.set)

    async def run() -> None:
        llm = AsyncLLM("folder")
        starting = asyncio.create_task(llm.start())
        await asyncio.to_thread(begun.wait, 20)
        if how == "cancelled":
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            go_on.set()
        else:
            await llm.close()
            go_on.set()
            with pytest.raises(Cancelled, match="while it was loading"):
                await starting

    monkeypatch.setattr(Engine, "start", start)
    asyncio.run(run())
    assert closed.wait(20)
