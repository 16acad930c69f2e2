"""Every call, whatever its protocol: its caller is identified once, and the log has one record of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.infer.serve.access.tokens import Callers
from tk.infer.serve.metrics.request_record import RequestRecord
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.tests.infer.serve.open_inference.conftest import Calls as OpenInferenceCalls
from tk.tests.infer.serve.open_inference.conftest import asking


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[tuple[HttpServerThread, grpc.Channel]]:
    server = HttpServerThread(engine, http_port=0)
    with grpc.insecure_channel(server.target) as channel:
        yield server, channel
    server.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts = Counter[str]()
    for kind, name in ((Callers, "identify"), (RequestRecord, "__init__")):
        real = getattr(kind, name)

        def counted(*arguments: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            counts[_name] += 1
            return _real(*arguments, **options)

        monkeypatch.setattr(kind, name, counted)
    return counts


def failed(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


def test_a_call_has_one_record_and_its_caller_is_identified_once(
    served: tuple[HttpServerThread, grpc.Channel], counts: Counter[str]
) -> None:
    server, channel = served
    stub, admin, open_inference = GenerationStub(channel), AdminStub(channel), OpenInferenceCalls(channel)
    hi, wait = pb.GenerateRequest(text="hi"), {"timeout": WAIT_SECONDS}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    calls: dict[str, Callable[[], Any]] = {
        "Generate": lambda: list(stub.Generate(hi, **wait)),
        "GenerateOnce": lambda: stub.GenerateOnce(hi, **wait),
        "a refused request": lambda: failed(lambda: stub.GenerateOnce(pb.GenerateRequest(), **wait)),
        "Tokenize": lambda: stub.Tokenize(pb.TokenizeRequest(text="hi"), **wait),
        "GetLoad": lambda: admin.GetLoad(pb.GetLoadRequest(), **wait),
        "a refused call": lambda: failed(lambda: admin.Abort(pb.AbortRequest(), **wait)),
        "ModelInfer": lambda: open_inference.ModelInfer(asking("hi"), **wait),
        "HTTP, completions": lambda: server.ask("/v1/completions", {"prompt": "hi"}),
        "HTTP, refused": lambda: server.ask("/v1/chat/completions", body | {"temperature": -1}),
        "HTTP, models": lambda: server.ask("/v1/models"),
    }
    for name, call in calls.items():
        counts.clear()
        call()
        assert counts == {"identify": 1, "__init__": 1}, name


def test_a_stream_of_requests_has_a_record_for_each(
    served: tuple[HttpServerThread, grpc.Channel], counts: Counter[str]
) -> None:
    calls = OpenInferenceCalls(served[1])
    list(calls.ModelStreamInfer(iter([asking("a"), asking("b")]), timeout=WAIT_SECONDS))
    assert counts == {"identify": 1, "__init__": 3}, "the stream itself has one too, and a line if it is refused"


def test_health_needs_no_caller(served: tuple[HttpServerThread, grpc.Channel], counts: Counter[str]) -> None:
    request = health_pb2.HealthCheckRequest(service="")
    health_pb2_grpc.HealthStub(served[1]).Check(request, timeout=WAIT_SECONDS)
    assert counts == {}
