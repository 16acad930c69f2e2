"""The service Admin over a scripted engine: what it reports, what it ends, who may call it, on which port."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.infer.engine.request.events import Done
from tk.infer.engine.schedule.statistics import EngineLoad
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread, delta, finished, started


@pytest.fixture
def admin(channel: grpc.Channel) -> Any:
    return AdminStub(channel)


def code_of(call: Any, request: Any, **how: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=WAIT_SECONDS, **how)
    name: str = caught.value.code().name
    return name


def test_the_load_has_the_state_and_the_engines_numbers(admin: Any, engine: FakeEngine) -> None:
    engine.statistics.load_now = EngineLoad(1, 2, 3, 9, 4, 3, 2, 0.25, 100.5, 7.5, 0.5, 1.25, 2**33, 2**34)
    load = admin.GetLoad(pb.GetLoadRequest(), timeout=WAIT_SECONDS)
    seen = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
    assert seen == {"state": pb.STATE_SERVING, **asdict(engine.statistics.load_now)}


def test_every_state_has_its_name(engine: FakeEngine) -> None:
    server = ServerThread(engine, is_loaded=False)
    with grpc.insecure_channel(server.target) as channel:

        def state() -> str:
            load = AdminStub(channel).GetLoad(pb.GetLoadRequest(), timeout=WAIT_SECONDS)
            return str(pb.State.Name(load.state))

        assert state() == "STATE_LOADING"
        server.run(server.server.set_ready())
        assert state() == "STATE_SERVING"
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="tk.v1.Generation"), timeout=WAIT_SECONDS
        )
        next(watch)
        engine.stall()
        next(watch)
        assert state() == "STATE_STALLED"
        engine.recover()
        next(watch)
        engine.die(retry_after=2.0)
        next(watch)
        assert state() == "STATE_RECOVERING"
        engine.recover()
        next(watch)
        assert state() == "STATE_SERVING"
        server.run(server.server.drain())
        next(watch)
        assert state() == "STATE_DRAINING"
        liveness = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        next(liveness)
        engine.die()
        next(liveness)
        assert state() == "STATE_FAILED"
    server.close()


def test_abort_ends_a_live_request_for_its_caller_and_in_the_engine(admin: Any, stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    mine = pb.AbortRequest(request_id="mine")

    def wait_gone() -> None:
        """Callers may have the status before the server has taken leave of the request."""
        while admin.Abort(mine, timeout=WAIT_SECONDS).found:
            pass

    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="mine"), timeout=WAIT_SECONDS)
    next(call)
    assert not admin.Abort(pb.AbortRequest(request_id="mine", principal="bob"), timeout=WAIT_SECONDS).found
    assert admin.Abort(mine, timeout=WAIT_SECONDS).found
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    assert "operator" in caught.value.details()
    engine.wait_for(lambda e: e.num_live == 0)
    assert set(engine.aborted) == {"mine"}
    wait_gone()
    again = stub.GenerateOnce.future(pb.GenerateRequest(text="hi", request_id="mine"), timeout=WAIT_SECONDS)
    engine.wait_for(lambda e: e.num_live == 1)
    assert admin.Abort(mine, timeout=WAIT_SECONDS).found
    assert again.code() == grpc.StatusCode.CANCELLED
    wait_gone()


def test_drain_refuses_new_requests_and_says_how_many_are_left(admin: Any, stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="live"), timeout=WAIT_SECONDS)
    next(call)
    assert admin.Drain(pb.DrainRequest(timeout_seconds=0.01), timeout=WAIT_SECONDS).running == 1
    assert admin.GetLoad(pb.GetLoadRequest(), timeout=WAIT_SECONDS).state == pb.STATE_DRAINING
    assert code_of(stub.GenerateOnce, pb.GenerateRequest(text="hi")) == "UNAVAILABLE"
    drained = admin.Drain.future(pb.DrainRequest(timeout_seconds=WAIT_SECONDS), timeout=WAIT_SECONDS)
    engine.emit("live", delta("abc"), finished(), Done())
    assert [response.WhichOneof("event") for response in call] == ["delta", "finished"]
    assert drained.result().running == 0
    assert engine.aborted == []


def test_the_cache_is_flushed_and_checked(admin: Any, engine: FakeEngine) -> None:
    assert admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(), timeout=WAIT_SECONDS).blocks == 5
    assert engine.statistics.flushed == 1
    report = admin.CheckCache(pb.CheckCacheRequest(), timeout=WAIT_SECONDS)
    assert (report.total, report.used, report.cached, report.free, report.leaked) == (64, 3, 5, 55, 1)
    assert list(report.problems) == ["a block is lost"]


@pytest.mark.parametrize(
    ("method", "request_", "status"),
    [
        ("Reload", pb.ReloadRequest(checkpoint="x"), "UNIMPLEMENTED"),
        ("Reload", pb.ReloadRequest(), "INVALID_ARGUMENT"),
        ("Reload", pb.ReloadRequest(checkpoint="a\0b"), "INVALID_ARGUMENT"),
        ("Abort", pb.AbortRequest(), "INVALID_ARGUMENT"),
        ("Drain", pb.DrainRequest(timeout_seconds=-1), "INVALID_ARGUMENT"),
        ("Drain", pb.DrainRequest(timeout_seconds=float("nan")), "INVALID_ARGUMENT"),
        ("Drain", pb.DrainRequest(timeout_seconds=float("inf")), "INVALID_ARGUMENT"),
    ],
)
def test_calls_that_cannot_be_carried_out(admin: Any, method: str, request_: Any, status: str) -> None:
    assert code_of(getattr(admin, method), request_) == status
    assert admin.GetLoad(pb.GetLoadRequest(), timeout=WAIT_SECONDS).state == pb.STATE_SERVING, "nothing happened"


def calls(admin: Any) -> list[tuple[Any, Any]]:
    """Every call of the service."""
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["Admin"].methods]
    assert len(names) == 9
    return [(getattr(admin, name), getattr(pb, f"{name}Request")()) for name in names]


def test_unknown_fields_of_every_call_are_refused(channel: grpc.Channel) -> None:
    for method in pb.DESCRIPTOR.services_by_name["Admin"].methods:
        call = channel.unary_unary(f"/tk.v1.Admin/{method.name}")
        assert code_of(call, b"\xa2\x06\x00") == "INVALID_ARGUMENT"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    callers = {"user's": Caller("alice", frozenset({GENERATE})), "operator's": Caller("ops", frozenset({ADMIN}))}
    path.write_text("".join(line_of(token_digest(token), caller) for token, caller in callers.items()))
    return path


@pytest.fixture
def guarded(engine: FakeEngine, tokens: Path) -> Iterator[ServerThread]:
    server = ServerThread(engine, tokens=tokens)
    yield server
    server.close()


def bearer(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),)}


def test_every_call_needs_the_role_admin(guarded: ServerThread, engine: FakeEngine) -> None:
    with grpc.insecure_channel(guarded.target) as channel:
        for call, request in calls(AdminStub(channel)):
            assert code_of(call, request) == "UNAUTHENTICATED"
            assert code_of(call, request, **bearer("user's")) == "PERMISSION_DENIED"
        load = AdminStub(channel).GetLoad(pb.GetLoadRequest(), timeout=WAIT_SECONDS, **bearer("operator's"))
        assert load.state == pb.STATE_SERVING, "no refused call has drained it"
        assert engine.statistics.flushed == 0


def test_an_operator_ends_a_request_of_a_principal(guarded: ServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    with grpc.insecure_channel(guarded.target) as channel:
        call = GenerationStub(channel).Generate(
            pb.GenerateRequest(text="hi", request_id="x"), timeout=WAIT_SECONDS, **bearer("user's")
        )
        next(call)
        admin: Any = AdminStub(channel)
        for principal, found in (("", False), ("ops", False), ("alice", True)):
            request = pb.AbortRequest(request_id="x", principal=principal)
            assert admin.Abort(request, timeout=WAIT_SECONDS, **bearer("operator's")).found is found
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.CANCELLED


def test_admin_on_a_port_of_its_own_is_not_on_the_main_one(
    engine: FakeEngine, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="tk"):
        server = ServerThread(engine, admin_port=0, tokens=tokens)
    [target] = [m.removeprefix("admin on ") for m in caplog.messages if m.startswith("admin on ")]
    with grpc.insecure_channel(server.target) as main, grpc.insecure_channel(target) as own:
        request = pb.GetLoadRequest()
        assert code_of(AdminStub(main).GetLoad, request, **bearer("operator's")) == "UNIMPLEMENTED"
        assert code_of(AdminStub(own).GetLoad, request) == "UNAUTHENTICATED"
        assert code_of(AdminStub(own).GetLoad, request, **bearer("user's")) == "PERMISSION_DENIED"
        load = AdminStub(own).GetLoad(request, timeout=WAIT_SECONDS, **bearer("operator's"))
        assert load.state == pb.STATE_SERVING
        info = pb.GetModelInfoRequest()
        assert code_of(GenerationStub(own).GetModelInfo, info, **bearer("user's")) == "UNIMPLEMENTED"
        health = health_pb2_grpc.HealthStub(own).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    server.close()
