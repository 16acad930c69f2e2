"""Adapters of a running engine: their names come and go while requests run, and new workers load them again."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.core.errors import Cancelled, CheckpointError, ConfigError, Overloaded, UnknownAdapter, WorkerDied
from tk.infer import LLM, AsyncLLM, SamplingParams
from tk.tests.infer.adapters import OWN, make_adapter

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
        shutil.rmtree(paths["gone"])
        assert [tokens(served, name) for name in ("", "kept", "gone")] == expected, "what is served is held"
        check_after_death(served, expected)
    with pytest.raises(Cancelled):
        served.load_adapter("other", paths["kept"])
    assert list(served.engine.adapters.table.in_slots) == [0]
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
