"""A load test of a real server over a scripted engine, in open and closed loops, and the command."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tk.cli.main import main
from tk.core.errors import Overloaded
from tk.infer.client.client import AsyncClient
from tk.infer.client.load_test import LoadTest, Observation, Workload
from tk.infer.engine.request.events import Done, Event
from tk.infer.engine.request.request import Request
from tk.tests.infer.serve.conftest import engine
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread, delta, finished, started

__all__ = ["engine"]
WORKLOAD = Workload(num_requests=24, prompt_tokens=(4, 9), new_tokens=(3, 3))


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ServerThread]:
    server = ServerThread(engine)
    yield server
    server.close()


def run(server: ServerThread, rate: float | None = None, concurrency: int = 1) -> list[Observation]:
    async def connected() -> list[Observation]:
        async with AsyncClient(server.target, max_attempts=1, timeout=20) as client:
            test = LoadTest(client, WORKLOAD, 256)
            return await (test.at_concurrency(concurrency) if rate is None else test.at_rate(rate))

    return asyncio.run(connected())


def test_an_open_loop_does_not_wait_for_answers(server: ServerThread, engine: FakeEngine) -> None:
    def hold_until_the_last(request: Request) -> list[Event]:
        if len(engine.requests) < WORKLOAD.num_requests:
            return [started(request)]
        for each in engine.requests[:-1]:
            engine.emit(each.request_id, delta("abc"), finished(), Done())
        return [started(request), delta("abc"), finished(), Done()]

    engine.script = hold_until_the_last
    observations = run(server, rate=400.0)
    assert [seen.status for seen in observations] == ["OK"] * 24
    assert [seen.num_tokens for seen in observations] == [3] * 24
    assert [seen.due for seen in observations] == list(WORKLOAD.arrivals(400.0))
    assert all(seen.due <= seen.sent <= seen.messages[0][0] <= seen.ended for seen in observations)
    assert all(seen.first_token_seconds > 0 for seen in observations)


def test_a_closed_loop_keeps_so_many_running(server: ServerThread, engine: FakeEngine) -> None:
    most, lock = 0, threading.Lock()

    def count(request: Request) -> list[Event]:
        nonlocal most
        with lock:
            most = max(most, engine.num_live)
        return [started(request), delta("ab"), delta("c"), finished(), Done()]

    engine.script = count
    observations = run(server, concurrency=3)
    assert len(observations) == len(engine.requests) == 24
    assert 1 <= most <= 3
    assert {seen.num_tokens for seen in observations} == {3}


def test_refusals_are_results_and_not_repeated(server: ServerThread, engine: FakeEngine) -> None:
    engine.refusal = Overloaded("full", 0.001)
    observations = run(server, concurrency=2)
    assert {seen.status for seen in observations} == {"RESOURCE_EXHAUSTED"}
    assert len(engine.requests) == 24


def test_the_command_reports_and_draws(
    server: ServerThread, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["bench", "serve", server.target, "--requests", "5", "--prompt-tokens", "4-9", "--new-tokens", "3"]
    assert main([*words, "--rate", "100", "--json", "-o", str(tmp_path / "out.svg")]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["statuses"]) == (5, {"OK": 5})
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert main([*words, "--concurrency", "2", "--first-token-ms", "10000"]) == 0
    assert "5 requests" in capsys.readouterr().out
    assert main([*words, "--rate", "1", "--concurrency", "2"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main(["bench", "serve", server.target, "--prompt-tokens", "x"]) == 2
    assert "64-256" in capsys.readouterr().err
