"""Calls leave nothing of ours that only a search for garbage finds: a server's memory would grow until it comes."""

import asyncio
import gc
import http.client
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import AsyncGeneratorType, FrameType
from typing import Any

import grpc
import pytest

from tk.infer.engine.request.request import Request
from tk.infer.engine.request.streams import EventStream
from tk.infer.serve.access.tokens import GENERATE, Caller, line_of, token_digest
from tk.infer.serve.http.connection import HttpConnection
from tk.infer.serve.http.framing import HttpRequest
from tk.infer.serve.metrics.request_record import RequestRecord
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, delta, started
from tk.tests.infer.serve.http.http_server import HttpServerThread

TIMES = 3
ENDING_SECONDS = 5.0
OF_A_CALL = (RequestRecord, EventStream, Request, HttpRequest, HttpConnection)


class Garbage:
    """What only a search finds, of what is made from now on, and iterators that it would close.

    Args:
        iterators: those that began in an event loop.
    """

    def __init__(self, iterators: "list[weakref.ref[AsyncGeneratorType[Any, Any]]]") -> None:
        self._iterators = iterators
        gc.collect()
        gc.freeze()  # objects of tests before are not ours, whenever they go
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)

    def close(self) -> None:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()

    def ours(self) -> Counter[str]:
        """The frames of the server, the objects of a call and the open iterators, by name."""
        end = time.monotonic() + ENDING_SECONDS  # a refused caller has its answer before its call has ended
        while (still_open := self._open()) and time.monotonic() < end:
            time.sleep(0.01)
        gc.collect()
        frames = (each.f_code for each in list(gc.garbage) if isinstance(each, FrameType))
        found = Counter(
            f"{code.co_qualname} of {code.co_filename}"
            for code in frames
            if "/infer/" in code.co_filename and "/tests/" not in code.co_filename
        )
        found.update(type(each).__qualname__ for each in gc.garbage if isinstance(each, OF_A_CALL))
        return found + still_open

    def _open(self) -> Counter[str]:
        return Counter(each.ag_code.co_qualname for ref in self._iterators if (each := ref()) is not None)


@pytest.fixture(autouse=True)
def iterators(monkeypatch: pytest.MonkeyPatch) -> "list[weakref.ref[AsyncGeneratorType[Any, Any]]]":
    """The asynchronous generators that event loops of this test begin.

    `gc.get_objects` would find them too, and objects that other threads are still making: CPython fails there then.
    """
    found: list[weakref.ref[AsyncGeneratorType[Any, Any]]] = []
    hook = asyncio.BaseEventLoop._asyncgen_firstiter_hook  # type: ignore[attr-defined]

    def begin(loop: asyncio.BaseEventLoop, iterator: AsyncGeneratorType[Any, Any]) -> None:
        found.append(weakref.ref(iterator))
        hook(loop, iterator)

    monkeypatch.setattr(asyncio.BaseEventLoop, "_asyncgen_firstiter_hook", begin)
    return found


@pytest.fixture
def garbage(iterators: "list[weakref.ref[AsyncGeneratorType[Any, Any]]]") -> Iterator[Garbage]:
    with closing(Garbage(iterators)) as garbage:
        yield garbage


def over_http(server: HttpServerThread, path: str, body: Any, **headers: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=WAIT_SECONDS)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | headers)
    connection.getresponse().read()
    connection.close()


def over_grpc(server: HttpServerThread, request: pb.GenerateRequest, cancels: bool = False) -> None:
    with grpc.insecure_channel(server.target) as channel, suppress(grpc.RpcError):
        call = GenerationStub(channel).Generate(request, timeout=WAIT_SECONDS)
        for _ in call:
            if cancels:
                call.cancel()


CALLS: dict[str, Callable[[HttpServerThread], None]] = {
    "a whole answer": lambda server: over_http(server, "/v1/completions", {"prompt": "a"}),
    "a stream": lambda server: over_http(server, "/v1/completions", {"prompt": "a", "stream": True}),
    "no JSON": lambda server: over_http(server, "/v1/completions", {"prompt": 5}),
    "an unknown field": lambda server: over_http(server, "/v1/chat/completions", {"massages": []}),
    "no such page": lambda server: over_http(server, "/v2", {}),
    "a stream over gRPC": lambda server: over_grpc(server, pb.GenerateRequest(text="a")),
    "a stream that is refused over gRPC": lambda server: over_grpc(server, pb.GenerateRequest()),
    "another model over gRPC": lambda server: over_grpc(server, pb.GenerateRequest(text="a", model="other")),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_nothing(name: str, server: HttpServerThread, garbage: Garbage) -> None:
    for _ in range(TIMES):
        CALLS[name](server)
    server.run(server.server.drain())
    assert not garbage.ours()


def test_a_cancelled_call_leaves_nothing(server: HttpServerThread, engine: FakeEngine, garbage: Garbage) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    for _ in range(TIMES):
        over_grpc(server, pb.GenerateRequest(text="a"), cancels=True)
    server.run(server.server.drain())
    assert not garbage.ours()


def test_a_call_that_is_late_leaves_nothing(server: HttpServerThread, engine: FakeEngine, garbage: Garbage) -> None:
    engine.script = lambda request: []
    for _ in range(TIMES):
        over_http(server, "/v1/completions", {"prompt": "a"}, **{"x-request-timeout": "0.05"})
    engine.settle()
    server.run(server.server.drain())
    assert not garbage.ours()


def test_a_caller_without_a_token_leaves_nothing(engine: FakeEngine, tmp_path: Path, garbage: Garbage) -> None:
    (tmp_path / "tokens").write_text(line_of(token_digest("one"), Caller("alice", frozenset({GENERATE}))))
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    for _ in range(TIMES):
        over_grpc(server, pb.GenerateRequest(text="a"))
        over_http(server, "/v1/completions", {"prompt": "a"})
    server.close()
    assert not garbage.ours()
