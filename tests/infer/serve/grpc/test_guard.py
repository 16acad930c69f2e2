"""A server with tokens: without one only health answers, and each service needs its role."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tk.infer.engine.request.events import Done
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread, delta, finished, started

CALLERS = {
    "alice's": Caller("alice", frozenset({GENERATE}), 2.0),
    "bob's": Caller("bob", frozenset({GENERATE})),
    "operator's": Caller("ops", frozenset({ADMIN})),
    "all": Caller("all", frozenset({GENERATE, ADMIN})),
}


@pytest.fixture
def server(engine: FakeEngine, tmp_path: Path) -> Iterator[ServerThread]:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(line_of(token_digest(token), caller) for token, caller in CALLERS.items()))
    server = ServerThread(engine, tokens=tokens)
    yield server
    server.close()


def authorized(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),), "timeout": WAIT_SECONDS}


def calls(stub: Any) -> list[Any]:
    """Every call of the service, streams included, with an empty message."""
    return [
        lambda **how: list(stub.Generate(pb.GenerateRequest(text="hi"), **how)),
        lambda **how: stub.GenerateOnce(pb.GenerateRequest(text="hi"), **how),
        lambda **how: stub.Score(pb.ScoreRequest(), **how),
        lambda **how: stub.Tokenize(pb.TokenizeRequest(text="hi"), **how),
        lambda **how: stub.Detokenize(pb.TokenIds(), **how),
        lambda **how: stub.GetModelInfo(pb.GetModelInfoRequest(), **how),
    ]


def status_of(call: Any, **how: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(**how)
    assert "x-request-id" not in dict(caught.value.initial_metadata()), "a refusal has trailers only"
    name: str = caught.value.code().name
    return name


def test_without_a_token_only_health_answers(channel: grpc.Channel, stub: Any, engine: FakeEngine) -> None:
    for call in calls(stub):
        assert status_of(call, timeout=WAIT_SECONDS) == "UNAUTHENTICATED"
        assert status_of(call, **authorized("nobody's")) == "UNAUTHENTICATED"
        assert status_of(call, **authorized("operator's")) == "PERMISSION_DENIED"
    for path in ("/tk.v1.Generation/Unknown", "/tk.v1.Admin/Unknown", "/other/Unknown"):
        unknown = channel.unary_unary(path)
        assert status_of(lambda _call=unknown, **how: _call(b"", **how), timeout=WAIT_SECONDS) == "UNAUTHENTICATED"
        assert status_of(lambda _call=unknown, **how: _call(b"", **how), **authorized("alice's")) == "UNIMPLEMENTED"
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    assert status_of(lambda **how: next(reflection.ServerReflectionInfo(iter([request]), **how))) == "UNAUTHENTICATED"
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "tk.v1.Generation"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert engine.requests == []


def test_a_token_of_the_role_is_enough(channel: grpc.Channel, stub: Any, engine: FakeEngine) -> None:
    result = stub.GenerateOnce(pb.GenerateRequest(text="hi"), **authorized("alice's"))
    assert result.choices[0].text == "abc"
    [request] = engine.requests
    assert (request.principal, request.weight) == ("alice", 2.0)
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    assert next(reflection.ServerReflectionInfo(iter([listing]), **authorized("operator's")))


def test_a_higher_priority_needs_the_role_admin(stub: Any, engine: FakeEngine) -> None:
    urgent = pb.GenerateRequest(text="hi", priority=1)
    assert status_of(lambda **how: stub.GenerateOnce(urgent, **how), **authorized("alice's")) == "PERMISSION_DENIED"
    stub.GenerateOnce(urgent, **authorized("all"))
    assert [request.priority for request in engine.requests] == [1]


def test_request_ids_of_others_are_neither_seen_nor_taken(stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    mine = stub.Generate(pb.GenerateRequest(text="hi", request_id="x"), **authorized("alice's"))
    theirs = stub.Generate(pb.GenerateRequest(text="hi", request_id="x"), **authorized("bob's"))
    assert next(mine).started.request_id == next(theirs).started.request_id == "x"
    again = pb.GenerateRequest(text="hi", request_id="x")
    assert status_of(lambda **how: list(stub.Generate(again, **how)), **authorized("alice's")) == "ALREADY_EXISTS"
    engine.emit(("bob", "x"), delta("to bob"), finished(), Done())
    assert next(theirs).delta.text == "to bob"
    mine.cancel()
    engine.wait_for(lambda e: e.aborted == ["x"])


def test_without_tokens_every_caller_has_both_roles(engine: FakeEngine) -> None:
    server = ServerThread(engine)
    with grpc.insecure_channel(server.target) as channel:
        GenerationStub(channel).GenerateOnce(pb.GenerateRequest(text="hi", priority=3), timeout=WAIT_SECONDS)
    server.close()
    assert [request.priority for request in engine.requests] == [3]
