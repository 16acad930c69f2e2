"""Adapters of a real server: many requests while names are given to other bytes, scores, and the operator's calls."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest

from tk.core.errors import Overloaded
from tk.infer.client.adapters import AdapterClient
from tk.infer.client.client import AsyncClient, Client
from tk.infer.client.connection import RemoteError
from tk.infer.engine.request.events import AdapterInfo, Delta, Started
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub
from tk.tests.infer.adapters import make_adapter, trained_logits
from tk.tests.infer.serve.forced_steps import save_forced_step
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.test_reload_end_to_end import wait_until
from tk.tests.infer.serve.tiny_model import write_tiny_model

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [7, 19, 200, 33, 5]
REQUESTS = 200
AT_ONCE = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters, after which PROMPT goes on differently."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), base, seed=seed, rank=8, alpha=64.0) for seed in range(2)]


@pytest.fixture(scope="module")
def serving(base: Path, versions: list[Path]) -> Iterator[Serving]:
    places = ("--max-adapters", "4", "--max-adapter-rank", "8")
    sizes = ("--kv-blocks", "128", "--threads", "1")
    serving = Serving(str(base), "--adapter", f"first={versions[0]}", *places, *sizes)
    yield serving.wait_ready()
    serving.close()


@pytest.fixture
def admin(serving: Serving) -> Iterator[AdapterClient]:
    with AdapterClient(serving.target, timeout=60) as admin:
        yield admin


async def _ask(client: AsyncClient, gate: asyncio.Semaphore) -> tuple[str, tuple[int, ...]]:
    """Returns the digest of a request's adapter and its new tokens."""
    async with gate:
        begin, *events = [event async for event in client.events(PROMPT, PARAMS, adapter="moving")]
        assert isinstance(begin, Started)
        return begin.adapter_sha256, tuple(t for event in events if isinstance(event, Delta) for t in event.token_ids)


def test_each_of_many_answers_is_of_one_version_of_its_adapter(
    serving: Serving, admin: AdapterClient, versions: list[Path]
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    with Client(serving.target) as client:
        for path in versions:
            digest = admin.load("moving", str(path)).sha256
            [answer] = client.generate([PROMPT], PARAMS, adapter="moving")
            assert answer.adapter_sha256 == digest
            expected[digest] = answer.token_ids
    assert len(set(expected.values())) == 2

    async def check() -> tuple[list[tuple[str, tuple[int, ...]]], int]:
        gate, num_loads = asyncio.Semaphore(AT_ONCE), 0
        async with AsyncClient(serving.target, max_attempts=1) as client:
            asked = asyncio.gather(*(_ask(client, gate) for _ in range(REQUESTS)))
            while not asked.done():
                path = versions[num_loads % 2]
                info = await asyncio.to_thread(admin.load, "moving", str(path))
                assert expected[info.sha256]
                num_loads += 1
            return await asked, num_loads

    found, num_loads = asyncio.run(check())
    assert len(found) == REQUESTS
    assert {tokens == expected[digest] for digest, tokens in found} == {True}
    assert {digest for digest, _ in found} == set(expected), f"{num_loads} loads"
    admin.unload("moving")


def test_scores_and_samples_are_those_of_training(
    serving: Serving, admin: AdapterClient, base: Path, versions: list[Path]
) -> None:
    with Client(serving.target) as client:
        info = client.model_info()
        assert (info.max_adapters, info.max_adapter_rank) == (4, 8)
        for name, path in (("first", versions[0]), ("", None)):
            logits = trained_logits(base, path, [*PROMPT, 9, 11]).astype(np.float64)[len(PROMPT) - 1 : -1]
            scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            score = client.score(PROMPT, [9, 11], adapter=name)
            np.testing.assert_allclose(score.logprobs, scores[[0, 1], [9, 11]], atol=1e-4)
            [answer] = client.generate([PROMPT], SamplingParams(max_new_tokens=1, temperature=0.0), adapter=name)
            assert answer.token_ids == (int(scores[0].argmax()),)


def test_operators_see_what_is_loaded_and_refusals_change_nothing(
    admin: AdapterClient, base: Path, versions: list[Path], tmp_path: Path
) -> None:
    [first] = admin.loaded()
    size = 4 * sum(8 * n for n in 2 * (32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 64, 32 + 64, 64 + 32))
    assert first == AdapterInfo("first", first.sha256, rank=8, bytes=size, step=1, live_requests=0)
    assert admin.load("same", str(versions[0])).sha256 == first.sha256
    large = make_adapter(tmp_path / "large", base, rank=9)
    other = make_adapter(tmp_path / "other", base, rank=2, identity="0" * 64)
    for path, words in (
        (base, "holds a model, not an adapter"),
        (tmp_path / "none", "does not exist"),
        (large, "max_adapter_rank is 8"),
        (other, "is an adapter of another base"),
    ):
        with pytest.raises(RemoteError, match=words) as caught:
            admin.load("first", str(path))
        assert caught.value.status == "FAILED_PRECONDITION"
    with AdapterClient(admin._target, max_attempts=1) as once:
        for name in ("third", "fourth"):
            once.load(name, str(versions[1]))
        with pytest.raises(Overloaded, match="All 4 places for adapters are taken"):
            once.load("fifth", str(versions[1]))
    for name in ("same", "third", "fourth"):
        admin.unload(name)
    assert admin.loaded() == [first]


@pytest.mark.matrix
def test_other_weights_keep_the_adapters_that_fit_and_are_refused_for_those_that_do_not(
    base: Path, tmp_path: Path
) -> None:
    first = save_forced_step(tmp_path / "run", base, 1)
    second, third = (save_forced_step(tmp_path / "run", base, step) for step in (2, 3))
    of_any = make_adapter(tmp_path / "any", base, rank=4, identity="")
    of_second = make_adapter(tmp_path / "second", second, rank=4)
    serving = Serving(str(first), "--adapter", f"any={of_any}", "--max-adapters", "3", "--threads", "1")
    with closing(serving.wait_ready()), grpc.insecure_channel(serving.target) as channel:

        def reload(step: Path) -> int:
            return int(AdminStub(channel).Reload(pb.ReloadRequest(checkpoint=str(step)), timeout=60).step)

        with AdapterClient(serving.target, timeout=60) as admin, Client(serving.target) as client:
            admin.load("later", str(of_any))
            before = admin.loaded()
            assert reload(second) == 2
            assert admin.loaded() == before
            [answer] = client.generate([PROMPT], PARAMS, adapter="later")
            assert (answer.step, answer.adapter_sha256) == (2, before[0].sha256)
            admin.load("fits", str(of_second))
            with pytest.raises(grpc.RpcError) as caught:
                reload(third)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "Step 2 serves on" in caught.value.details()
            assert "is an adapter of another base" in caught.value.details()
            admin.unload("fits")
            assert reload(third) == 3
            assert admin.loaded() == before


@pytest.mark.matrix
def test_newer_steps_of_an_adapters_run_are_followed(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "sql"
    make_adapter(run, base, seed=1, rank=4)
    serving = Serving(str(run), "--follow", "--threads", "1", "--kv-blocks", "64")
    with closing(serving.wait_ready()), AdapterClient(serving.target, timeout=60) as admin:
        [first] = admin.loaded()
        assert (first.name, first.step) == ("sql", 1)
        make_adapter(run, base, seed=2, rank=4, step=2)
        wait_until(lambda: [each.step for each in admin.loaded()] == [2])
        [second] = admin.loaded()
        assert first.sha256 != second.sha256
        with Client(serving.target) as client:
            [answer] = client.generate([PROMPT], PARAMS, adapter="sql")
            assert answer.adapter_sha256 == second.sha256
