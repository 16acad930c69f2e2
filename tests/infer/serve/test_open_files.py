"""The open files of a server: what its limits need, what it is allowed, and a server whose callers want more."""

import http.client
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.core.errors import ConfigError
from tk.infer.client.client import Client
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.serve import options as descriptors
from tk.infer.serve.options import MAX_CONNECTIONS, connections_per_port, raised_limit
from tk.tests.infer.serve.serving import WAIT_SECONDS, Command, Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

CROWD = 200


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The connections of a port in a process that may have so many open files."""

    def most(limit: int, **server: int) -> int:
        monkeypatch.setattr(descriptors, "raised_limit", lambda wanted: min(limit, wanted))
        return connections_per_port(**server)

    return most


def own(tp: int) -> int:
    return descriptors._OWN + descriptors._OF_RANK * tp


def test_with_enough_every_port_has_the_most_connections(
    most: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    assert most(10**6, ports=2, callers=1088, tp=1) == MAX_CONNECTIONS
    assert most(own(1) + 2 * 1088, ports=2, callers=1088, tp=1) == 1088
    assert not caplog.records


def test_too_few_are_said_with_the_right_number(most: Callable[..., int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        few = most(1024, ports=2, callers=1088, tp=1)
    assert own(1) + 2 * few <= 1024
    [line] = [record.getMessage() for record in caplog.records]
    assert {"1024", str(few), "1088", str(own(1) + 2 * 1088)} < {word.rstrip(",;") for word in line.split()}


def test_without_room_for_a_connection_nothing_starts(most: Callable[..., int]) -> None:
    assert most(own(2) + 3, ports=3, callers=10, tp=2) == 1
    with pytest.raises(ConfigError, match=f"may have 99 open files.*Allow {own(2) + 3 * 10}"):
        most(99, ports=3, callers=10, tp=2)


def test_the_limit_is_raised_as_far_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 1024, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.update(soft=pair[0], hard=pair[1]))
    assert raised_limit(500) == 1024
    assert raised_limit(2000) == limits["soft"] == 2000
    assert raised_limit(9000) == limits["soft"] == 4096
    limits["hard"] = resource.RLIM_INFINITY
    assert raised_limit(9000) == limits["soft"] == 9000
    assert limits["hard"] == resource.RLIM_INFINITY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def few(model: Path) -> Iterator[Serving]:
    """A server that may have 160 open files."""
    serving = Serving(str(model), "--http", "0", "--kv-blocks", "64", "--threads", "1", open_files=160).wait_ready()
    yield serving
    serving.close()


def test_a_server_with_few_open_files_says_so_and_serves_on_while_a_crowd_is_connected(few: Serving) -> None:
    assert few.process.stdout is not None
    addresses = [few.target, few.process.stdout.readline().split()[1]]
    with Client(few.target) as client, grpc.insecure_channel(few.target) as channel, ExitStack() as crowd:
        one = SamplingParams(max_new_tokens=2, ignore_eos=True)
        kept = http.client.HTTPConnection(addresses[1], timeout=WAIT_SECONDS)
        crowd.callback(kept.close)

        def check() -> None:
            """Callers that are connected are answered over every protocol."""
            kept.request("GET", "/health")
            response = kept.getresponse()
            assert (response.status, response.read()) == (200, b'{"status":"serving"}')
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            assert len(client.generate(["a"], one)) == 1

        check()
        for address in addresses:
            host, port = address.split(":")
            for _ in range(CROWD):
                crowd.enter_context(socket.create_connection((host, int(port)), WAIT_SECONDS))
            check()
    code, _, log = few.end(signal.SIGTERM)
    assert code == 0
    assert "160 open files (ulimit -n) are few" in log
    assert "Traceback" not in log
    assert len(log) < 100_000


def test_a_server_that_could_take_no_connection_does_not_start(model: Path) -> None:
    command = Command("serve", str(model), "--port", "0", open_files=64)
    try:
        code, _, errors = command.wait()
    finally:
        command.close()
    assert code == 2, errors
    assert "may have 64 open files" in errors
