"""Reloads of real servers under load: no request fails, and every answer is of one step."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tk.checkpoint.files import locks
from tk.core.machine_memory import free_memory
from tk.infer.client.client import Client
from tk.infer.engine.request.events import Delta, Started
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub
from tk.tests.infer.serve.forced_steps import damage, save_forced_step, token_of
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

WAIT_SECONDS = 60.0
STREAMS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    save_forced_step(run, model, 1)
    return run


@contextmanager
def served(*arguments: str) -> Iterator[tuple[Serving, Any]]:
    size = () if "--kv-memory" in arguments else ("--kv-blocks", "64")
    serving = Serving(*arguments, *size, "--threads", "1").wait_ready()
    try:
        with grpc.insecure_channel(serving.target) as channel:
            yield serving, AdminStub(channel)
    finally:
        serving.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_steps(run: Path) -> list[str]:
    """Returns the steps that a process reads or serves, which no job prunes."""
    found = []
    for step in sorted(run.glob("step-*")):
        with locks.unread_folder(step) as unread:
            if not unread:
                found.append(step.name)
    return found


class Load:
    """Requests one after another in several streams, each answer of the token of one step."""

    def __init__(self, target: str) -> None:
        self.tokens: list[int] = []
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(STREAMS)
        self._done = [self._threads.submit(self._ask, target, index) for index in range(STREAMS)]

    def _ask(self, target: str, index: int) -> None:
        params = SamplingParams(max_new_tokens=80, ignore_eos=True)
        with Client(target, max_attempts=1) as client:
            while not self._over.is_set():
                begin, *events = client.events("x" * (40 + index), params)
                tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
                assert len(tokens) == 80
                [token] = set(tokens)
                assert isinstance(begin, Started)
                assert token == token_of(begin.step)
                self.tokens.append(token)

    def end(self) -> None:
        self._over.set()
        for done in self._done:
            done.result(WAIT_SECONDS)
        self._threads.shutdown()


@pytest.mark.parametrize(
    ("reloads", "tp"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.matrix) for each in ((3, 1), (50, 1), (50, 2)))]
)
def test_reloads_under_load_fail_no_request_and_mix_no_answer(model: Path, run: Path, reloads: int, tp: int) -> None:
    with served(str(run), "--tp", str(tp)) as (serving, admin):
        load = Load(serving.target)
        for step in range(2, 2 + reloads):
            folder = save_forced_step(run, model, step)
            answer = admin.Reload(pb.ReloadRequest(checkpoint=str(folder)), timeout=WAIT_SECONDS)
            assert answer.step == step
            assert len(answer.manifest_sha256) == 64
            seen = len(load.tokens)
            wait_until(lambda seen=seen: len(load.tokens) >= seen + STREAMS)  # type: ignore[misc]
        load.end()
        assert set(load.tokens) == {token_of(step) for step in range(1, 2 + reloads)}
        wait_until(lambda: read_steps(run) == [f"step-{1 + reloads:08}"])  # the others can be pruned
        with Client(serving.target) as client:
            assert client.model_info().step == 1 + reloads
            [answer] = client.generate(["x"], SamplingParams(max_new_tokens=2, ignore_eos=True))
            assert set(answer.token_ids) == {token_of(1 + reloads)}
        wait_until(lambda: len(serving.worker_ids()) == tp)
        report = admin.CheckCache(pb.CheckCacheRequest(), timeout=WAIT_SECONDS)
        assert (report.leaked, list(report.problems)) == (0, [])
        code, _, stderr = serving.end(signal.SIGTERM)
        assert code == 0, stderr
        assert stderr.count("\nboth ") == reloads, "the memory of both sets of weights"


def test_requests_end_on_the_weights_they_began_with_and_refused_steps_change_nothing(model: Path, run: Path) -> None:
    params = SamplingParams(max_new_tokens=450, ignore_eos=True)
    with served(str(run)) as (serving, admin), Client(serving.target, max_attempts=1) as client:

        def refusal(checkpoint: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> str:
            with pytest.raises(grpc.RpcError) as caught:
                admin.Reload(pb.ReloadRequest(checkpoint=checkpoint), timeout=WAIT_SECONDS)
            assert caught.value.code() is code
            assert client.model_info().step == 1
            return str(caught.value.details())

        damaged = save_forced_step(run, model, 3)
        damage(damaged)
        wider = save_forced_step(run.parent / "other", model, 4, rope_theta=5000.0)
        texts = Path(shutil.copytree(model, run.parent / "texts"))
        (texts / "tokenizer_config.json").write_text('{"add_bos_token": false}')
        assert "Step 1 serves on" in refusal(str(damaged))
        assert "rope" in refusal(str(wider))
        assert "tokenizer" in refusal(str(texts))
        assert "missing" in refusal(str(run / "missing"))
        refusal("", grpc.StatusCode.INVALID_ARGUMENT)
        assert len(serving.worker_ids()) == 1
        assert read_steps(run) == ["step-00000001"]

        second = save_forced_step(run, model, 2)
        events = client.events("a", params)
        begin = next(events)
        assert admin.Reload(pb.ReloadRequest(checkpoint=str(second)), timeout=WAIT_SECONDS).step == 2
        [new] = client.generate("a", SamplingParams(max_new_tokens=5, ignore_eos=True))
        tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        assert isinstance(begin, Started)
        assert (set(tokens), len(tokens)) == ({token_of(1)}, 450)
        assert set(new.token_ids) == {token_of(2)}
        assert (begin.step, new.step) == (1, 2)
        assert new.usage.cached_tokens == 0


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_a_step_without_room_beside_the_running_one_is_refused(model: Path, run: Path, tp: int) -> None:
    """The cache, of which hardly a page is ever written, takes more than half of the free memory."""
    each = free_memory() * 7 // 10 // tp
    second = save_forced_step(run.parent / "new", model, 2)
    with served(str(run), "--tp", str(tp), "--kv-memory", f"{each >> 20}MiB") as (serving, admin):
        workers = serving.worker_ids()
        load = Load(serving.target)
        with pytest.raises(grpc.RpcError) as caught:
            admin.Reload(pb.ReloadRequest(checkpoint=str(second)), timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = str(caught.value.details())
        assert "Step 1 serves on: A second set of weights and its cache take" in details
        assert "--kv-memory" in details
        seen = len(load.tokens)
        wait_until(lambda: len(load.tokens) >= seen + STREAMS)
        load.end()
        assert set(load.tokens) == {token_of(1)}
        assert sorted(serving.worker_ids()) == sorted(workers)


def test_follow_serves_newer_steps_and_skips_damaged_ones(model: Path, run: Path) -> None:
    with served(str(run), "--follow") as (serving, _), Client(serving.target) as client:
        save_forced_step(run.parent / "new", model, 3)
        damage(run.parent / "new" / "step-00000003")
        shutil.copytree(run.parent / "new" / "step-00000003", run / "step-00000003")
        save_forced_step(run, model, 2)
        wait_until(lambda: client.model_info().step == 2)
        [answer] = client.generate("a", SamplingParams(max_new_tokens=5, ignore_eos=True))
        assert set(answer.token_ids) == {token_of(2)}
        code, _, stderr = serving.end(signal.SIGTERM)
        assert code == 0, stderr
        assert "step-00000003 is not served" in stderr
