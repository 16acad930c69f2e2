"""The way down of a server, and its port."""

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.infer.engine.request.events import Delta, Done, Event
from tk.infer.engine.request.streams import MAX_TOKENS_PER_DELTA
from tk.infer.serve.access.tokens import Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread, delta, finished, started


@pytest.fixture
def live_call(stub: Any, engine: FakeEngine) -> Any:
    """A stream of which the client has seen Started."""
    engine.script = lambda request: [started(request)]
    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="live"), timeout=WAIT_SECONDS)
    assert next(call).started.request_id == "live"
    return call


def test_draining_refuses_new_requests_and_finishes_live_ones(
    server: ServerThread, channel: grpc.Channel, stub: Any, engine: FakeEngine, live_call: Any
) -> None:
    readiness = health_pb2.HealthCheckRequest(service="tk.v1.Generation")
    watch = health_pb2_grpc.HealthStub(channel).Watch(readiness, timeout=WAIT_SECONDS)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    drained = server.start(server.server.drain())
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING

    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_SECONDS).name == "fake"
    assert not drained.done()

    engine.emit("live", delta("abc"), finished(), Done())
    assert [response.WhichOneof("event") for response in live_call] == ["delta", "finished"]
    drained.result(WAIT_SECONDS)
    assert engine.aborted == []


def test_draining_waits_for_readers_that_the_engine_has_outrun(server: ServerThread, engine: FakeEngine) -> None:
    num_deltas, text = 20, "x" * 600_000
    large: list[Event] = [Delta(0, text, (1,) * MAX_TOKENS_PER_DELTA)] * num_deltas
    engine.script = lambda request: [started(request), *large, finished(), Done()]
    options = [("grpc.http2.bdp_probe", 0)]  # else a client whose pings are slow takes all of it before it is read
    with grpc.insecure_channel(server.target, options) as channel:
        stub = GenerationStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
        next(call)
        engine.wait_for(lambda e: e.num_live == 0)
        engine.settle()
        drained = server.start(server.server.drain(WAIT_SECONDS))
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_SECONDS).name == "fake"
        assert not drained.done()
        assert sum(len(response.delta.text) for response in call) == num_deltas * len(text)
        drained.result(WAIT_SECONDS)


def test_a_request_that_outlives_the_drain_timeout_ends_unavailable(engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    server = ServerThread(engine, drain_timeout=0.05)
    with grpc.insecure_channel(server.target) as channel:
        call = GenerationStub(channel).Generate(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
        next(call)
        server.run(server.server.drain())
        server.close()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert len(engine.aborted) == 1
    assert engine.num_live == 0


@pytest.mark.parametrize("moment", ["before it stops", "after it has stopped"])
def test_deaths_that_a_server_hears_of_leave_no_task_behind(engine: FakeEngine, moment: str) -> None:
    server = ServerThread(engine)

    async def num_notices() -> int:
        return sum("Server._notice_death" in repr(task.get_coro()) for task in asyncio.all_tasks())

    if moment == "before it stops":
        engine.die()
        engine.die()
        engine.settle()
        assert server.run(num_notices()) == 1, "one task for all deaths"
    server.run(server.server.stop())
    engine.die()
    engine.settle()
    assert server.run(num_notices()) == 0
    server.close()


def test_prometheus_reads_what_callers_did(engine: FakeEngine, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of(token_digest("secret"), Caller("alice", frozenset({"generate"}))))
    server = ServerThread(engine, metrics_port=0, tokens=tokens)
    known = (("authorization", "Bearer secret"),)
    with grpc.insecure_channel(server.target) as channel:
        stub = GenerationStub(channel)
        stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS, metadata=known)
        for wrong, metadata in ((pb.GenerateRequest(text="hi"), ()), (pb.GenerateRequest(), known)):
            with pytest.raises(grpc.RpcError):
                stub.GenerateOnce(wrong, timeout=WAIT_SECONDS, metadata=metadata)
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS) as response:
        text = response.read().decode()
    assert 'tk_request_success_total{finished_reason="length",model_name="fake"} 1.0' in text
    assert 'tk_inter_token_latency_seconds_count{model_name="fake"} 1.0' in text
    for status in ("UNAUTHENTICATED", "INVALID_ARGUMENT"):
        assert f'tk_request_rejections_total{{model_name="fake",status="{status}"}} 1.0' in text
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS)
