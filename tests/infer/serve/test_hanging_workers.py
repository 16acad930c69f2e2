"""Servers whose workers hang instead of dying: health says so, callers can leave, and a signal ends them in time.

The table has the worker that is stopped, when, and what is asked then. Stopped processes are stopped by the kernel.
"""

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.core.errors import TkError
from tk.infer.client.client import Client
from tk.infer.client.connection import LoadReader, Unavailable
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving, shared_memory
from tk.tests.infer.serve.tiny_model import write_tiny_model

LONGEST = 1 << 15  # tokens of the model, so that a request does not end by itself
SLACK = 6.0  # seconds beside a promised time, for a machine that does other work
HEALTH_SECONDS = 2.0  # promised, for steps of no length
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LETTERS = SamplingParams(temperature=0.0, max_new_tokens=LONGEST // 2, regex="[a-z]*")
LONG = SamplingParams(temperature=0.0, max_new_tokens=LONGEST // 2, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A worker of `tp`, stopped `when` something is computed."""

    tp: int
    victim: int
    when: str

    def __str__(self) -> str:
        return f"tp{self.tp}-rank{self.victim}-{self.when}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    return folder


class Observed:
    """A server that is ready, with a worker that can be stopped, and everybody who asks it."""

    def __init__(self, serving: Serving, case: Case, pool: ThreadPoolExecutor) -> None:
        self.serving, self.case, self._pool = serving.wait_ready(), case, pool
        stdout = serving.process.stdout
        assert stdout is not None
        self.http = stdout.readline().split()[1]
        self.workers = sorted(serving.worker_ids())  # rank 0 is started first

    @property
    def victim(self) -> int:
        return self.workers[self.case.victim]

    def hang(self, client: Client) -> "Future[str]":
        """Stops the worker while a request is computed, and returns the request's future text."""
        if self.case.when == "idle":
            os.kill(self.victim, signal.SIGSTOP)
            wait_until(lambda: not self.is_ready(), HEALTH_SECONDS + SLACK)
        if self.case.when == "prompt":
            prompt = [1 + index % 250 for index in range(LONGEST // 2)]
            asked = self._pool.submit(lambda: client.generate([prompt], SHORT)[0].text)
            with LoadReader(self.serving.target) as reader:
                while not reader.read()["running"]:
                    assert not asked.done()
        else:
            deltas = client.stream("a", LETTERS if self.case.when == "masks" else LONG)
            if self.case.when != "idle":
                next(deltas)
            asked = self._pool.submit(lambda: "".join(delta.text for delta in deltas))
            with LoadReader(self.serving.target) as reader:
                while not (load := reader.read())["running"] + load["waiting"]:
                    assert not asked.done()
        os.kill(self.victim, signal.SIGSTOP)
        return asked

    def resume(self) -> None:
        os.kill(self.victim, signal.SIGCONT)

    def state(self) -> str:
        with LoadReader(self.serving.target) as reader:
            return str(reader.read()["state"])

    def http_status(self) -> int:
        connection = http.client.HTTPConnection(self.http, timeout=WAIT_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    def is_ready(self) -> bool:
        with grpc.insecure_channel(self.serving.target) as channel:
            request = health_pb2.HealthCheckRequest(service="tk.v1.Generation")
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status
            return bool(status != NOT_SERVING)

    def end(self, number: int = signal.SIGTERM) -> tuple[float, int, str]:
        """The seconds from a signal to the exit, the exit code and the log."""
        begun = time.monotonic()
        code, _, log = self.serving.end(number)
        return time.monotonic() - begun, code, log


@contextmanager
def observed(model: Path, case: Case, *options: str) -> Iterator[tuple[Observed, Client]]:
    size = ("--tp", str(case.tp), "--kv-blocks", str(LONGEST // 32), "--threads", "1")
    serving = Serving(str(model), *size, "--http", "0", *options)
    with closing(serving), ThreadPoolExecutor(4) as pool:
        seen = Observed(serving, case, pool)
        with Client(serving.target, max_attempts=1) as client:
            yield seen, client
        serving.process.kill()


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Returns the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "not in time"
        time.sleep(0.02)
    return time.monotonic() - begun


def alive(workers: list[int]) -> list[int]:
    return [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def covered(*chosen: Case) -> list[object]:
    """All cases, those that are not chosen for `make test-all` only."""
    whole = [
        Case(tp, victim, when)
        for tp, victim in ((1, 0), (2, 1), (2, 0))
        for when in ("idle", "prompt", "decode", "masks")
    ]
    return [pytest.param(case, id=str(case), marks=() if case in chosen else (pytest.mark.matrix,)) for case in whole]


@pytest.mark.every(2)
@pytest.mark.parametrize("case", covered(Case(2, 1, "masks"), Case(1, 0, "idle")))
def test_health_fails_while_a_worker_hangs_and_callers_can_leave(model: Path, case: Case) -> None:
    with observed(model, case) as (seen, client):
        assert (seen.is_ready(), seen.state(), seen.http_status()) == (True, "serving", 200)
        asked = seen.hang(client)
        wait_until(lambda: not seen.is_ready(), HEALTH_SECONDS + SLACK)
        assert (seen.state(), seen.http_status()) == ("stalled", 503)
        with Client(seen.serving.target, max_attempts=1, timeout=0.5) as other:
            begun = time.monotonic()
            with pytest.raises(TkError):  # a caller that leaves is answered at once; its request was taken
                other.generate(["b"], SHORT)
            assert time.monotonic() - begun < SLACK
        assert not asked.done(), "what was asked before is not failed yet"
        seen.resume()
        wait_until(seen.is_ready, SLACK)
        assert (seen.state(), seen.http_status()) == ("serving", 200)
        assert len(client.generate(["c"], SHORT)[0].token_ids) == 4
        *_, log = seen.end(signal.SIGKILL)
    words = "cannot compute the next step" if case.when == "idle" else "do not answer"
    [stalled] = [line for line in log.splitlines() if words in line]
    assert f"rank {case.victim} (process {seen.victim}, stopped)" in stalled
    assert ("was expected to take" in stalled) == (case.when != "idle")
    [back] = [line for line in log.splitlines() if "answer again" in line]
    assert log.index(stalled) < log.index(back)


@pytest.mark.every(2)
@pytest.mark.parametrize("case", covered(Case(1, 0, "decode"), Case(2, 1, "prompt")))
def test_a_drain_ends_in_its_time_while_a_worker_hangs(
    model: Path, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = shared_memory()
    with observed(model, case, "--drain-timeout", "1") as (seen, client):
        asked = seen.hang(client)
        seconds, code, log = seen.end()
        with pytest.raises(Unavailable):
            asked.result(WAIT_SECONDS)
    assert (code, alive(seen.workers)) == (0, []), log
    assert seconds < 1 + 2 + SLACK  # 1.7 s where the machine has time for it
    assert "drain timeout: 1 live requests are left" in log
    assert (list(tmp_path.iterdir()), shared_memory() - before) == ([], set())


@pytest.mark.parametrize("case", covered(Case(1, 0, "prompt")))
def test_a_step_beyond_its_time_restarts_the_workers(model: Path, case: Case) -> None:
    with observed(model, case, "--step-timeout", "0.5", "--max-restarts", "1") as (seen, client):
        expected = client.generate(["d"], SHORT)[0].token_ids
        asked = seen.hang(client)
        with pytest.raises(Unavailable, match="did not answer"):
            asked.result(WAIT_SECONDS)
        wait_until(lambda: not alive(seen.workers), SLACK)
        wait_until(seen.is_ready, WAIT_SECONDS)
        assert client.generate(["d"], SHORT)[0].token_ids == expected
        seen.workers = sorted(seen.serving.worker_ids())
        asked = seen.hang(client)
        with pytest.raises(Unavailable, match="did not answer"):
            asked.result(WAIT_SECONDS)
        code, _, log = seen.serving.wait()
    assert (code, alive(seen.workers)) == (1, []), log
