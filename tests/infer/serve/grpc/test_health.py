"""grpc.health.v1, with a Watch that reports changes."""

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread
from tk.tests.infer.serve.hostile import PREFACE, SETTINGS, call, connection, frame

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READINESS = "tk.v1.Generation"
HEALTH = "grpc.health.v1.Health"
INITIAL_WINDOW = 4  # of HTTP/2's settings: the bytes of an answer that may be sent before the client asks for more
CERTIFICATES = Path(__file__).parents[1] / "certificates"


def check(channel: grpc.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return int(stub.Check(request, timeout=WAIT_SECONDS).status)


def test_alive_and_ready(channel: grpc.Channel) -> None:
    assert (check(channel, ""), check(channel, READINESS)) == (SERVING, SERVING)
    with pytest.raises(grpc.RpcError) as caught:
        check(channel, "tk.v1.Other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def watch(channel: grpc.Channel, service: str) -> Any:
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Watch(request, timeout=WAIT_SECONDS)


def test_watchers_of_both_learn_of_a_dead_worker(channel: grpc.Channel, engine: FakeEngine) -> None:
    watches = [watch(channel, service) for service in ("", READINESS)]
    assert [next(one).status for one in watches] == [SERVING, SERVING]
    engine.die()
    assert [next(one).status for one in watches] == [NOT_SERVING, NOT_SERVING]
    assert (check(channel, ""), check(channel, READINESS)) == (NOT_SERVING, NOT_SERVING)


def test_a_server_whose_workers_start_again_lives_but_is_not_ready(channel: grpc.Channel, engine: FakeEngine) -> None:
    readiness = watch(channel, READINESS)
    assert next(readiness).status == SERVING
    engine.die(retry_after=2.0)
    assert next(readiness).status == NOT_SERVING
    assert check(channel, "") == SERVING
    engine.recover()
    assert next(readiness).status == SERVING


def test_a_draining_server_is_not_ready_when_its_workers_have_started_again(
    channel: grpc.Channel, server: ServerThread, engine: FakeEngine
) -> None:
    readiness = watch(channel, READINESS)
    assert next(readiness).status == SERVING
    server.run(server.server.drain())
    assert next(readiness).status == NOT_SERVING
    engine.die(retry_after=2.0)
    engine.recover()
    engine.settle()
    assert (check(channel, ""), check(channel, READINESS)) == (SERVING, NOT_SERVING)


def test_a_draining_server_lives_but_is_not_ready(channel: grpc.Channel, server: ServerThread) -> None:
    readiness = watch(channel, READINESS)
    assert next(readiness).status == SERVING
    server.run(server.server.drain())
    assert next(readiness).status == NOT_SERVING
    assert (check(channel, ""), check(channel, READINESS)) == (SERVING, NOT_SERVING)


def window_of_nothing(service: str) -> bytes:
    """A watcher's frames that let the server send no byte of an answer."""
    request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return PREFACE + frame(SETTINGS, struct.pack(">HI", INITIAL_WINDOW, 0)) + call(1, f"/{HEALTH}/Watch", request)


def test_watchers_that_read_nothing_hold_up_no_change(
    channel: grpc.Channel, server: ServerThread, engine: FakeEngine
) -> None:
    with ExitStack() as stack:
        for service in ("", READINESS):
            hostile = stack.enter_context(connection(server.target, window_of_nothing(service)))
            received = b""
            while b"application/grpc" not in received:  # the call's headers
                received += hostile.recv(65536)
        readiness = watch(channel, READINESS)
        assert next(readiness).status == SERVING
        engine.die(retry_after=2.0)
        assert next(readiness).status == NOT_SERVING
        engine.recover()
        assert next(readiness).status == SERVING
        server.run(server.server.drain())
        assert next(readiness).status == NOT_SERVING
        assert (check(channel, ""), check(channel, READINESS)) == (SERVING, NOT_SERVING)


def test_a_watcher_of_another_service_learns_that_it_is_unknown(channel: grpc.Channel) -> None:
    assert next(watch(channel, "tk.v1.Other")).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize("message", [b"\0" * 2, b"\x0a\x05ab", b"\x12\0", b"\x0a\xe9\x07" + b"a" * 1001])
def test_damaged_or_large_requests_are_refused(channel: grpc.Channel, message: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{HEALTH}/Check")(message, timeout=WAIT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
