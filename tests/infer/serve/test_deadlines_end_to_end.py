"""Deadlines with a real engine whose worker is stopped: every call is answered, and nothing is left when it goes on."""

import http.client
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.open_inference.conftest import Calls, asking
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving, stopped
from tk.tests.infer.serve.tiny_model import write_tiny_model

ALLOWED = 0.7  # seconds
OF_SERVER = (
    7  # calls whose deadlines only the server keeps; those of others their clients keep, too, which may be first
)
MOST_LATE = 3.0  # seconds after the deadline, on a machine that does other work too; 0.5 are promised on a quiet one
ASKED: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], **ASKED}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    folder = write_tiny_model(tmp_path / "tiny-llama")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    serving = Serving(str(folder), "--kv-blocks", "64", "--max-running", "4", "--http", "0").wait_ready()
    yield serving
    serving.close()


class Calling:
    """Calls of both ports, each by its path or method and with the request's id."""

    def __init__(self, serving: Serving, channel: grpc.Channel) -> None:
        assert serving.process.stdout is not None
        self.http = serving.process.stdout.readline().removeprefix("http ").strip()
        self._channel = channel
        self.stub: Any = GenerationStub(channel)

    def ask(self, path: str, name: str, seconds: float = ALLOWED, **body: Any) -> str:
        """The code of the error, or "ok"."""
        connection = http.client.HTTPConnection(self.http, timeout=WAIT_SECONDS)
        headers = {"content-type": "application/json", "x-request-id": name, "x-request-timeout": str(seconds)}
        connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
        answer = connection.getresponse().read().decode()
        connection.close()
        found = re.search(r'"code":"(\w+)"', answer)
        return found[1].upper() if found else "ok"

    def infer(self, name: str, seconds: float = ALLOWED) -> str:
        request = asking("a", timeout=round(seconds * 1e6), max_tokens=40, ignore_eos=True)
        request.id = name
        return self.code(lambda: Calls(self._channel).ModelInfer(request, timeout=WAIT_SECONDS))

    def generate(self, method: str, name: str, seconds: float = ALLOWED) -> str:
        request = pb.GenerateRequest(text="a", request_id=name)
        request.stopping.max_new_tokens, request.stopping.ignore_eos = 40, True
        if method == "Generate":
            return self.code(lambda: list(self.stub.Generate(request, timeout=seconds)))
        return self.code(lambda: self.stub.GenerateOnce(request, timeout=seconds))

    def score(self, seconds: float = ALLOWED) -> str:
        return self.code(lambda: self.stub.Score(pb.ScoreRequest(text="a", continuation_text="b"), timeout=seconds))

    @staticmethod
    def code(call: Callable[[], object]) -> str:
        try:
            call()
        except grpc.RpcError as error:
            return str(error.code().name)
        return "ok"


def test_every_deadline_is_kept_while_a_worker_is_stopped(serving: Serving) -> None:
    [worker] = serving.worker_ids()
    with grpc.insecure_channel(serving.target) as channel, ThreadPoolExecutor(16) as pool:
        calling = Calling(serving, channel)
        first = calling.stub.Generate(pb.GenerateRequest(text="a", stopping={"ignore_eos": True}), timeout=2 * ALLOWED)
        assert next(first).HasField("started"), "it runs when the worker stops"
        with stopped(worker):
            calls: list[Callable[[float], str]] = [
                lambda seconds: calling.ask("completions", "a", seconds, prompt="a", **ASKED),
                lambda seconds: calling.ask("completions", "b", seconds, prompt="a", stream=True, **ASKED),
                lambda seconds: calling.ask("completions", "c", seconds, prompt=["a", "b"], **ASKED),
                lambda seconds: calling.ask("chat/completions", "d", seconds, **CHAT),
                lambda seconds: calling.ask("chat/completions", "e", seconds, stream=True, **CHAT),
                lambda seconds: calling.infer("f", seconds),
                lambda seconds: calling.generate("Generate", "g", seconds),
                lambda seconds: calling.generate("GenerateOnce", "h", seconds),
                calling.score,
            ]
            late = [pool.submit(call, ALLOWED) for call in calls]
            assert [each.result(WAIT_SECONDS) for each in late] == ["DEADLINE_EXCEEDED"] * len(calls)
            assert calling.code(lambda: list(first)) == "DEADLINE_EXCEEDED"
            left = calling.stub.GenerateOnce.future(pb.GenerateRequest(text="a", request_id="left"))
            left.cancel()
        admin: Any = AdminStub(channel)
        while (load := admin.GetLoad(pb.GetLoadRequest())).running or load.waiting:
            pass
        books = admin.CheckCache(pb.CheckCacheRequest())
        assert (books.leaked, books.used, list(books.problems)) == (0, 0, [])
        assert [call(WAIT_SECONDS) for call in calls] == ["ok"] * len(calls), "their ids are free, and nothing hangs"
        [template] = set(serving.worker_ids()) - {worker}
        os.kill(template, signal.SIGSTOP)
        assert calls[3](ALLOWED) == "DEADLINE_EXCEEDED"
        assert [call(WAIT_SECONDS) for call in calls[3:5]] == ["ok"] * 2, "by another process"
    code, _, log = serving.end(signal.SIGTERM)
    assert code == 0
    seconds = re.findall(r"method=.* status=\"?DEADLINE_EXCEEDED.* total_seconds=([0-9.]+)", log)
    assert OF_SERVER <= len(seconds) <= len(calls) + 2
    assert max(map(float, seconds)) < 2 * ALLOWED + MOST_LATE
    assert sorted(map(float, seconds))[-2] < ALLOWED + MOST_LATE
