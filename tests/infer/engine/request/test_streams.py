"""The bridge from the engine's thread to a handler: order, ends, and the memory for a slow reader."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import Overloaded, WorkerDied
from tk.infer.engine.request import streams as streams_module
from tk.infer.engine.request.events import Delta, Done, Event, Failed, Finished, SentEvent, TokenLogprob
from tk.infer.engine.request.streams import MAX_TOKENS_PER_DELTA, EventStream, Wakeups
from tk.tests.infer.serve.fake_engine import delta, finished


def read_all(events: Sequence[Event]) -> list[SentEvent]:
    """Returns the events that a reader gets after all were pushed."""

    async def read() -> list[SentEvent]:
        stream = EventStream(Wakeups())
        for event in events:
            stream.push(event)
        return [event async for event in stream]

    return asyncio.run(read())


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=40))
def test_a_late_reader_gets_all_of_every_sample_in_few_deltas(pieces: list[tuple[int, str]]) -> None:
    got = read_all([*(delta(text, index) for index, text in pieces), *(finished(index) for index in range(3)), Done()])
    deltas = [event for event in got if isinstance(event, Delta)]
    assert len(deltas) == len({index for index, _ in pieces})
    for index in range(3):
        text = "".join(text for i, text in pieces if i == index)
        mine = [event for event in got if isinstance(event, (Delta, Finished)) and event.index == index]
        assert "".join(event.text for event in mine if isinstance(event, Delta)) == text
        assert [token for event in mine if isinstance(event, Delta) for token in event.token_ids] == list(text.encode())
        assert isinstance(mine[-1], Finished)


def test_joined_deltas_keep_one_logprob_per_token_and_a_bounded_size() -> None:
    logprob = TokenLogprob(5, -0.5, 1, b"x")
    num_tokens = 3 * MAX_TOKENS_PER_DELTA
    got = read_all([*(Delta(0, "x", (5,), (logprob,)) for _ in range(num_tokens)), finished(), Done()])
    sizes = [len(event.token_ids) for event in got if isinstance(event, Delta)]
    assert sizes == [MAX_TOKENS_PER_DELTA] * 3
    assert all(len(event.logprobs) == len(event.token_ids) for event in got if isinstance(event, Delta))


def test_a_reader_that_keeps_up_gets_every_delta_by_itself() -> None:
    async def run() -> list[str]:
        wakeups = Wakeups()
        stream = EventStream(wakeups)
        texts = []

        def send(text: str) -> None:
            stream.push(delta(text))
            wakeups.flush()

        for text in ("a", "b", "c"):
            threading.Thread(target=send, args=(text,)).start()
            event = await anext(stream)
            assert isinstance(event, Delta)
            texts.append(event.text)
        return texts

    assert asyncio.run(run()) == ["a", "b", "c"]


def test_failure_comes_after_the_events_pushed_before_it() -> None:
    async def run() -> list[str]:
        stream = EventStream(Wakeups())
        for event in (delta("a"), Failed(WorkerDied("gone")), delta("never")):
            stream.push(event)
        first = await anext(stream)
        assert isinstance(first, Delta)
        with pytest.raises(WorkerDied, match="gone"):
            await anext(stream)
        return [first.text]

    assert asyncio.run(run()) == ["a"]


def test_interrupt_comes_before_pushed_events_and_is_not_the_engines_end() -> None:
    async def run() -> None:
        stream = EventStream(Wakeups())
        stream.push(delta("a"))
        stream.interrupt(Overloaded("enough"))
        with pytest.raises(Overloaded):
            await anext(stream)
        assert not stream.ended

    asyncio.run(run())


@pytest.mark.parametrize(
    "order", [("end", "leave"), ("leave", "end"), ("end", "turn", "leave"), ("leave", "turn", "end")]
)
def test_a_stream_closes_once_when_engine_and_reader_are_done(order: tuple[str, ...]) -> None:
    async def run() -> list[int]:
        closed: list[int] = []
        wakeups = Wakeups()
        stream = EventStream(wakeups, on_close=lambda: closed.append(1))
        for step in order:
            assert closed == []
            if step == "end":
                for event in (delta("a"), finished(), Done(), Done(), Failed(WorkerDied("late"))):
                    stream.push(event)
                wakeups.flush()
            elif step == "leave":
                stream.leave()
            else:
                await asyncio.sleep(0)
        stream.leave()
        for _ in range(3):
            await asyncio.sleep(0)
        return closed

    assert asyncio.run(run()) == [1]


def test_pushing_to_a_closed_loop_is_harmless() -> None:
    wakeups = Wakeups()

    async def make() -> EventStream:
        return EventStream(wakeups)

    stream = asyncio.run(make())
    stream.push(Done())
    wakeups.flush()
    assert stream.ended


def test_a_flush_wakes_every_reader_of_a_loop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four streams get a delta in each of ten steps, from another thread."""
    num_streams, num_steps = 64, 10

    async def run() -> int:
        wakeups, loop = Wakeups(), asyncio.get_running_loop()
        calls: list[object] = []
        call_soon = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *arguments: object) -> object:
            calls.append(callback)
            return call_soon(callback, *arguments)

        streams = [EventStream(wakeups) for _ in range(num_streams)]
        readers = [asyncio.create_task(anext(stream)) for stream in streams]

        def step(text: str) -> None:
            for stream in streams:
                stream.push(delta(text))
            wakeups.flush()
            wakeups.flush()  # of nothing

        for number in range(num_steps):
            await asyncio.sleep(0)  # every reader waits
            with monkeypatch.context() as patch:
                patch.setattr(loop, "call_soon_threadsafe", counted)
                thread = threading.Thread(target=step, args=(str(number),))
                thread.start()
                thread.join()
            events = [await reader for reader in readers]
            assert [event.text for event in events if isinstance(event, Delta)] == [str(number)] * num_streams
            readers = [asyncio.create_task(anext(stream)) for stream in streams]
        for reader in readers:
            reader.cancel()
        return len(calls)

    assert asyncio.run(run()) == num_steps


def test_streams_of_several_loops_are_all_woken() -> None:
    wakeups, streams = Wakeups(), list[EventStream]()
    begun = threading.Semaphore(0)

    async def read() -> str:
        stream = EventStream(wakeups)
        streams.append(stream)
        begun.release()
        event = await anext(stream)
        assert isinstance(event, Delta)
        return event.text

    with ThreadPoolExecutor(2) as threads:
        texts = [threads.submit(lambda: asyncio.run(read())) for _ in range(2)]
        for _ in texts:
            begun.acquire()
        for stream in streams:
            stream.push(delta("a"))
        wakeups.flush()
        assert [text.result(20) for text in texts] == ["a", "a"]


async def read_in_parallel(wakeups: Wakeups, streams: Sequence[EventStream]) -> list[list[int]]:
    """Starts a reader for each stream; returns the numbers of tokens of their messages, which grow as they read."""
    seen: list[list[int]] = [[] for _ in streams]

    async def read(stream: EventStream, sizes: list[int]) -> None:
        async for event in stream:
            if isinstance(event, Delta):
                sizes.append(len(event.token_ids))

    for stream, sizes in zip(streams, seen, strict=True):
        task = asyncio.create_task(read(stream, sizes))
        task.add_done_callback(lambda done: done.result())
    await settle()
    return seen


async def settle() -> None:
    """Lets all that is due on the loop run."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("count", "at_once"), [(2, 1), (3, 2), (5, 3), (9, 4)])
def test_in_a_crowd_tokens_come_several_at_once(count: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HOLD_SECONDS", 3600)

    async def run() -> None:
        wakeups = Wakeups(crowd=2)
        streams = [EventStream(wakeups) for _ in range(count)]
        seen = await read_in_parallel(wakeups, streams)
        for _ in range(2 * at_once):
            for stream in streams:
                stream.push(delta("a"))
            wakeups.flush()
            await settle()
        assert seen == [[at_once, at_once]] * count
        for stream in streams:  # the end brings what is held
            stream.push(delta("a"))
            stream.push(finished())
            stream.push(Done())
        wakeups.flush()
        await settle()
        assert seen == [[at_once, at_once, 1]] * count

    asyncio.run(run())


def test_no_token_waits_long_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HOLD_SECONDS", 0.02)  # the test above shows that tokens are held

    async def run() -> None:
        wakeups = Wakeups(crowd=1)
        streams = [EventStream(wakeups) for _ in range(3)]
        seen = await read_in_parallel(wakeups, streams)
        for stream in streams:
            stream.push(delta("a"))
        wakeups.flush()
        async with asyncio.timeout(20):
            while not all(seen):
                await settle()
        assert seen == [[1], [1], [1]]
        streams[0].push(delta("b"))  # alone: no crowd
        wakeups.flush()
        await settle()
        assert seen == [[1, 1], [1], [1]]

    asyncio.run(run())


def test_many_tokens_that_come_at_once_are_deltas_of_a_bounded_size() -> None:
    ids = tuple(range(2 * MAX_TOKENS_PER_DELTA + 1))
    entries = tuple(TokenLogprob(token, -1.0, 1, b"x") for token in ids)
    deltas = [event for event in read_all([Delta(0, "text", ids, entries), Done()]) if isinstance(event, Delta)]
    assert all(len(delta.token_ids) <= MAX_TOKENS_PER_DELTA for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == list(ids)
    assert [entry for delta in deltas for entry in delta.logprobs] == list(entries)
    assert "".join(delta.text for delta in deltas) == "text"
