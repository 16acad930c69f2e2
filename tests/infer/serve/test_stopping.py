"""Signals to a real server under load: the first loses no request, the second ends it within a second."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tk.core.errors import Cancelled
from tk.infer.client.client import Client
from tk.infer.client.connection import LoadReader, Unavailable
from tk.infer.engine.request.events import Delta, Started
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.serving import Serving, shared_memory
from tk.tests.infer.serve.tiny_model import write_tiny_model

STREAMS, LENGTH = 4, 150
LONGEST = 1 << 17  # tokens of the model with a long prompt, whose steps take long at its end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    return folder


@contextmanager
def served(model: Path, tp: int, *options: str) -> Iterator[Serving]:
    serving = Serving(str(model), "--tp", str(tp), "--threads", "1", *options)
    try:
        yield serving
    finally:
        serving.close()


def end_now(serving: Serving) -> tuple[float, int]:
    """The seconds from a signal to the exit, and the exit code."""
    sent_at = time.monotonic()
    serving.process.send_signal(signal.SIGTERM)
    code = serving.process.wait(60)
    return time.monotonic() - sent_at, code


def alive(workers: list[int]) -> list[int]:
    return [worker for worker in workers if Path(f"/proc/{worker}").exists()]


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_a_second_signal_does_not_wait_for_a_step_that_never_ends(model: Path, tp: int) -> None:
    with served(model, tp, "--kv-blocks", "64") as serving, ThreadPoolExecutor(1) as pool:
        workers = serving.wait_ready().worker_ids()
        assert len(workers) == tp
        with Client(serving.target, max_attempts=1) as client:
            deltas = client.stream("a", SamplingParams(max_new_tokens=2000, ignore_eos=True))
            next(deltas)
            os.kill(workers[-1], signal.SIGSTOP)
            serving.process.send_signal(signal.SIGTERM)
            serving.wait_draining()
            rest = pool.submit(list, deltas)
            seconds, code = end_now(serving)
            with pytest.raises(Unavailable):
                rest.result(60)
        assert (code, alive(workers)) == (130, [])
        assert seconds < 30  # 0.7 s where the machine has time for it; without a limit of its own, 60 s or no end


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_second_signal_does_not_wait_for_a_long_prompt(model: Path, tp: int) -> None:
    with served(model, tp, "--kv-blocks", str(LONGEST // 32)) as serving, ThreadPoolExecutor(1) as pool:
        workers = serving.wait_ready().worker_ids()
        with Client(serving.target, max_attempts=1) as client:
            prompt = [1 + index % 250 for index in range(LONGEST - 2)]
            answer = pool.submit(client.generate, [prompt], SamplingParams(max_new_tokens=1))
            with LoadReader(serving.target) as reader:
                while not reader.read()["running"]:
                    assert not answer.done()
            serving.process.send_signal(signal.SIGTERM)
            serving.wait_draining()
            assert not answer.done()
            seconds, code = end_now(serving)
            with pytest.raises(Unavailable):
                answer.result(60)
        assert (code, alive(workers)) == (130, [])
        assert seconds < 30  # 0.7 s where the machine has time for it; without a limit of its own, 60 s or no end


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_sigterm_under_load_loses_no_admitted_request(
    model: Path, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams ask one request after another; after the signal each ends its request and gets a refusal for the next."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = shared_memory()
    params = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)
    started = threading.Semaphore(0)

    def ask(index: int) -> int:
        with Client(serving.target, max_attempts=1) as client:
            for answered in range(1000):
                events = client.events("x" * (index + 1), params)
                try:
                    assert isinstance(next(events), Started)
                except (Unavailable, Cancelled):  # gRPC cancels a call that reaches a stopping server
                    return answered
                started.release()
                assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == LENGTH
        raise AssertionError("the server never refused")

    with served(model, tp, "--kv-blocks", "64", "--max-running", "2") as serving, ThreadPoolExecutor(STREAMS) as pool:
        workers = serving.wait_ready().worker_ids()
        answers = [pool.submit(ask, index) for index in range(STREAMS)]
        for _ in range(STREAMS):
            assert started.acquire(timeout=60)
        serving.process.send_signal(signal.SIGTERM)
        counts = [answer.result(60) for answer in answers]
        code, _, stderr = serving.wait()
    assert (code, alive(workers)) == (0, []), stderr
    assert min(counts) > 0
    admitted = [line for line in stderr.splitlines() if "method=Generate" in line and "error=Draining" not in line]
    assert ["status=OK" in line for line in admitted] == [True] * sum(counts)
    assert (list(tmp_path.iterdir()), shared_memory() - before) == ([], set())
