"""Adapters of a running engine: their names come and go while requests run, and new workers load them again."""

import asyncio
import os
import select
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import pytest

from tk.core.errors import Cancelled, CheckpointError, ConfigError, Overloaded, UnknownAdapter, WorkerDied
from tk.infer import LLM, AsyncLLM, SamplingParams
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.request.events import AdapterInfo, Delta, Done, Event, Failed
from tk.infer.engine.request.request import Request
from tk.infer.engine.worker.processes import WorkerProcesses
from tk.tests.infer.adapters import OWN, make_adapter
from tk.tests.infer.engine.worker import held_worker

PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [7, 19, 200, 33, 5]


def tokens(llm: LLM, adapter: str) -> tuple[int, ...]:
    """Returns the tokens after PROMPT."""
    return llm.generate([PROMPT], PARAMS, adapter=adapter)[0].choices[0].token_ids


def test_a_request_ends_with_the_adapter_that_it_began_with(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base, long = model_folder("grouped"), SamplingParams(max_new_tokens=150, temperature=0.0, ignore_eos=True)
    paths = [make_adapter(tmp_path / str(seed), base, seed=seed, rank=8) for seed in range(2)]

    async def check() -> None:
        async with AsyncLLM(base, max_adapters=3, max_adapter_rank=16, kv_blocks=64) as llm:
            with pytest.raises(UnknownAdapter, match="'x' is not loaded; loaded are: none"):
                await llm.generate([PROMPT], adapter="x")
            await llm.load_adapter("x", paths[0])
            [expected] = await llm.generate([PROMPT], long, adapter="x")
            stream = llm.stream(PROMPT, long, adapter="x")
            found = list((await anext(stream)).token_ids)
            await llm.load_adapter("x", paths[1])
            [other] = await llm.generate([PROMPT], long, adapter="x")
            found += [token async for delta in stream for token in delta.token_ids]
            assert tuple(found) == expected.choices[0].token_ids != other.choices[0].token_ids
            assert list(llm.engine.adapters.table.in_slots) == [1], "the first one's last request has ended"
            llm.unload_adapter("x")
            with pytest.raises(UnknownAdapter, match="'x' is not loaded; loaded are: none"):
                llm.unload_adapter("x")

    asyncio.run(check())


def test_loads_that_fail_change_nothing_and_new_workers_load_what_is_there(
    model_folder: Callable[[str], Path], tmp_path: Path, llm: LLM
) -> None:
    base = model_folder("grouped")
    own = {"kept": OWN["llama3"], "gone": {}}
    paths = {name: make_adapter(tmp_path / name, base, seed=len(name), rank=4, **more) for name, more in own.items()}
    with pytest.raises(ConfigError, match="has no places for adapters"):
        llm.load_adapter("kept", paths["kept"])
    with LLM(base, adapters=paths, max_restarts=1, kv_blocks=64) as served:
        expected = [tokens(served, name) for name in ("", "kept", "gone")]
        assert len(set(expected)) == 3
        with pytest.raises(CheckpointError, match="holds a model, not an adapter"):
            served.load_adapter("kept", base)
        with pytest.raises(ConfigError, match="adapters has ''; a name has"):
            served.load_adapter("", paths["gone"])
        with pytest.raises(Overloaded, match="All 2 places for adapters are taken"):
            served.load_adapter("other", paths["gone"])
        for name in ("kept", "gone", "kept"):  # a name's own place is no obstacle, and is free again
            served.load_adapter("gone", paths[name])
            served.load_adapter("gone", paths["gone"])
        shutil.rmtree(paths["gone"])
        assert [tokens(served, name) for name in ("", "kept", "gone")] == expected, "what is served is held"
        check_after_death(served, expected)
    with pytest.raises(Cancelled):
        served.load_adapter("other", paths["kept"])
    assert served.engine.adapters.table.loaded.keys() == {"kept"}
    assert len(served.engine.adapters.table.in_slots) == 1
    with pytest.raises(ConfigError, match="adapters has 2 entries, and max_adapters is 1"):
        LLM(base, adapters=paths, max_adapters=1)


def check_after_death(served: LLM, expected: list[tuple[int, ...]]) -> None:
    """Kills a worker, and checks which adapters the new one has."""
    os.kill(served.engine.worker_process_ids[0], signal.SIGKILL)
    while True:
        try:
            assert [tokens(served, name) for name in ("", "kept")] == expected[:2]
            break
        except WorkerDied:
            pass
    with pytest.raises(UnknownAdapter, match="'gone' is not loaded; loaded are: 'kept'"):
        tokens(served, "gone")


class HeldLoads:
    """An engine whose workers pack an adapter only when the test lets them.

    Args:
        pipe: the path of the named pipes of the ranks, without their numbers.
    """

    def __init__(self, base: Path, pipe: Path, tp: int, max_restarts: int = 0) -> None:
        self.pipes = [Path(f"{pipe}{rank}") for rank in range(tp)]
        for each in self.pipes:
            os.mkfifo(each)
        options = EngineOptions(base, tp=tp, max_adapters=1, max_restarts=max_restarts, kv_blocks=64, threads=1)
        self.engine = Engine.start(options, processes=WorkerProcesses(tp, 1, held_worker.MODULE))
        self.threads = ThreadPoolExecutor(4)

    def load(self, path: Path) -> "Future[AdapterInfo]":
        """Begins to load an adapter under the name "a"."""
        return self.threads.submit(self.engine.adapters.load, "a", path)

    def answer(self, *words: str, unless: "Future[None] | None" = None) -> None:
        """Lets each rank pack its next adapter, or refuse it with a word; waits until it wants to, or for `unless`."""
        for rank, word in enumerate(words):
            with self.asking(rank, unless) as writer:
                if writer is not None:
                    writer.write(word)

    @contextmanager
    def asking(self, rank: int, unless: "Future[None] | None" = None) -> Iterator[IO[str] | None]:
        """A context that begins when a rank wants to pack, and holds it until its end; None if `unless` comes first."""
        end = time.monotonic() + 60
        while unless is None or not unless.done():
            try:
                writing = os.open(self.pipes[rank], os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nothing reads it yet
                assert time.monotonic() < end, "the rank never wanted to pack"
                time.sleep(0.01)
                continue
            with os.fdopen(writing, "w") as writer:
                yield writer
            return
        yield None

    def tokens(self, adapter: str = "") -> tuple[int, ...]:
        """Returns the tokens after PROMPT; raises the error of a request that failed."""
        events: SimpleQueue[Event] = SimpleQueue()
        self.engine.submit(Request(tuple(PROMPT), PARAMS, uuid.uuid4().hex, adapter=adapter), events.put)
        found: list[int] = []
        while not isinstance(event := events.get(timeout=60), Done):
            if isinstance(event, Failed):
                raise event.error
            found += event.token_ids if isinstance(event, Delta) else ()
        return tuple(found)

    def close(self) -> None:
        self.engine.close()
        self.threads.shutdown()


@pytest.fixture
def two(model_folder: Callable[[str], Path], tmp_path: Path) -> list[Path]:
    """Two adapters of the base."""
    base = model_folder("grouped")
    return [make_adapter(tmp_path / str(seed), base, seed=seed, rank=8, alpha=64.0) for seed in range(2)]


def test_steps_go_on_while_workers_pack_and_loads_wait_for_each_other(
    model_folder: Callable[[str], Path], tmp_path: Path, two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(held_worker.PIPE, str(tmp_path / "pipe"))
    with closing(HeldLoads(model_folder("grouped"), tmp_path / "pipe", tp=1)) as held:
        first, second = held.load(two[0]), held.load(two[1])
        plain = held.tokens()
        assert not first.done()
        assert not second.done()
        with pytest.raises(UnknownAdapter):
            held.tokens("a")
        held.answer("")
        wait((first, second), 60, FIRST_COMPLETED)  # a pipe cannot tell two readers apart
        held.answer("")
        infos = {each.result(60).sha256: each for each in (first, second)}
        [now] = held.engine.adapters.infos
        assert now.sha256 in infos, "that of the load which came last"
        last = held.tokens("a")
        assert last != plain
        replacing = held.load(two[0] if infos[now.sha256] is second else two[1])
        assert held.tokens("a") == last, "the one that is replaced serves on"
        assert held.engine.adapters.unload("a")[0] == now
        held.answer("")
        assert replacing.result(60).sha256 == held.engine.adapters.infos[0].sha256 != now.sha256
        assert held.tokens("a") not in (plain, last)
        assert held.tokens() == plain
        unfinished = held.load(two[0])
        assert held.tokens() == plain
        closing_engine = held.threads.submit(held.engine.close)
        with pytest.raises(Cancelled, match="engine was closed"):
            unfinished.result(60)
        held.answer("", unless=closing_engine)  # a worker that had begun to pack ends by itself when it has
        closing_engine.result(60)


def test_a_worker_that_dies_while_it_packs_fails_that_load_alone(
    model_folder: Callable[[str], Path], tmp_path: Path, two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(held_worker.PIPE, str(tmp_path / "pipe"))
    with closing(HeldLoads(model_folder("grouped"), tmp_path / "pipe", 1, max_restarts=1)) as held:
        loaded = held.load(two[0])
        held.answer("")
        info, expected = loaded.result(60), held.tokens("a")
        lost = held.load(two[1])
        assert held.tokens("a") == expected
        with held.asking(0):
            kill(held.engine.worker_process_ids[0])
        with pytest.raises(WorkerDied, match="ended before"):
            lost.result(60)
        held.answer("")  # the new worker loads what had a name
        assert again(held, "a") == expected
        assert held.engine.adapters.infos == (info,)
        other = held.load(two[1])
        held.answer("")
        assert other.result(60) != info


def kill(process_id: int) -> None:
    """Kills a process and waits for its end: a word for the next one would go to it while it reads its pipe."""
    handle = os.pidfd_open(process_id)
    os.kill(process_id, signal.SIGKILL)
    ended = select.poll()  # select takes no high descriptor
    ended.register(handle, select.POLLIN)
    assert ended.poll(20_000), "it did not end"
    os.close(handle)


def again(held: HeldLoads, adapter: str) -> tuple[int, ...]:
    """Returns the tokens after PROMPT when the workers have started again."""
    while True:
        with suppress(WorkerDied):
            return held.tokens(adapter)


@pytest.mark.parametrize("wrong", [1, pytest.param(0, marks=pytest.mark.matrix)])
def test_a_rank_that_cannot_pack_fails_that_load_alone(
    model_folder: Callable[[str], Path], tmp_path: Path, two: list[Path], monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    monkeypatch.setenv(held_worker.PIPE, str(tmp_path / "pipe"))
    with closing(HeldLoads(model_folder("grouped"), tmp_path / "pipe", tp=2)) as held:
        loaded = held.load(two[0])
        held.answer("", "")
        info, expected = loaded.result(60), held.tokens("a")
        refused = held.load(two[1])
        held.answer(*("a damaged adapter" if rank == wrong else "" for rank in range(2)))
        with pytest.raises(CheckpointError, match="a damaged adapter"):
            refused.result(60)
        assert (held.engine.adapters.infos, held.tokens("a")) == ((info,), expected)
        other = held.load(two[1])
        held.answer("", "")
        assert other.result(60) != info
        assert held.tokens("a") != expected
