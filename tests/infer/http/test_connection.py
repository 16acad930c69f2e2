"""Sizes, times and the end of connections."""

import json
import socket

import pytest

from tk.infer.http import connection as connection_module
from tk.infer.http import http_port as port_module
from tk.infer.http.connection import MAX_BODY_BYTES
from tk.infer.requests.events import Done, Event
from tk.tests.infer.http.http_server import HttpServerThread, post, read_to_end
from tk.tests.infer.server.fake_engine import FakeEngine, delta, finished, started

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def read_until(connection: socket.socket, last: bytes) -> bytes:
    received = b""
    while not received.endswith(last):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def test_requests_follow_each_other_on_a_connection(server: HttpServerThread) -> None:
    with server.connect(HEALTH) as connection:
        read_until(connection, b"}")
        connection.sendall(post("/v1/completions", b'{"prompt":"hi"}') + HEALTH + HEALTH)  # all before an answer
        answers = read_until(connection, b'{"status":"serving"}')
        while answers.count(b"HTTP/1.1 200") < 3:
            answers += read_until(connection, b'{"status":"serving"}')
        assert answers.count(b'"text":"abc"') == 1


@pytest.mark.parametrize("size", [MAX_BODY_BYTES, MAX_BODY_BYTES + 1])
def test_the_size_of_a_body_is_bounded(server: HttpServerThread, size: int) -> None:
    body = json.dumps({"prompt": "hi"}).encode().ljust(size)
    status = b"HTTP/1.1 200" if size <= MAX_BODY_BYTES else b"HTTP/1.1 413"
    with server.connect(post("/v1/completions", body, "connection: close")) as whole:
        assert read_to_end(whole).startswith(status)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:500_000], body[500_000:]))
    with server.connect(head + b"transfer-encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n") as chunked:
        assert read_to_end(chunked).startswith(status)


def test_a_stated_size_is_refused_before_the_body_comes(server: HttpServerThread) -> None:
    for length in (MAX_BODY_BYTES + 1, 10**18):
        with server.connect(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length) as one:
            assert read_to_end(one).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("name", "data", "answer"),
    [
        ("HEADER_SECONDS", b"GET /health HTTP/1.1\r\nho", b"HTTP/1.1 408"),
        ("BODY_SECONDS", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", b"HTTP/1.1 408"),
        ("IDLE_SECONDS", b"", b""),
    ],
)
def test_a_slow_client_loses_its_connection(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(connection_module, name, 0.1)
    server = HttpServerThread(engine, http_port=0)
    with server.connect(data) as connection:
        assert read_to_end(connection)[: len(b"HTTP/1.1 408")] == answer
    server.close()


def test_a_client_that_reads_nothing_loses_its_request(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "WRITE_SECONDS", 0.1)
    large: list[Event] = [delta("x" * 600_000), finished(1)]
    engine.script = lambda request: [started(request), *large * 30]
    server = HttpServerThread(engine, http_port=0)
    with server.connect(post("/v1/completions", b'{"prompt":"hi","stream":true}')):
        engine.wait_for(lambda e: len(e.aborted) == 1)
    server.close()


def test_the_number_of_connections_is_bounded(server: HttpServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "MAX_CONNECTIONS", 2)
    held = [server.connect(HEALTH) for _ in range(2)]
    for connection in held:
        read_until(connection, b"}")
    with server.connect() as third:
        assert read_to_end(third).startswith(b"HTTP/1.1 503")
    for connection in held:
        connection.close()


def test_draining_closes_idle_connections_and_finishes_streams(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    fresh, idle = server.connect(), server.connect(HEALTH)
    read_until(idle, b"}")
    stream = server.connect(post("/v1/completions", b'{"prompt":"hi","stream":true}', "x-request-id: mine"))
    read_until(stream, b"\n\n\r\n")
    engine.wait_for(lambda e: e.num_live == 1)
    drained = server.start(server.server.drain())
    assert read_to_end(idle) == read_to_end(fresh) == b""
    assert not drained.done()
    engine.emit("mine", delta("bc"), finished(), Done())
    assert b"data: [DONE]" in read_to_end(stream)
    drained.result(20)
    assert engine.aborted == []
    for connection in (fresh, idle, stream):
        connection.close()


def test_stopping_ends_streams_with_an_error(engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    server = HttpServerThread(engine, http_port=0)
    with server.connect(post("/v1/completions", b'{"prompt":"hi","stream":true}')) as stream:
        read_until(stream, b"\n\n\r\n")
        server.close()
        assert b'"code":"unavailable"' in read_to_end(stream)
    assert len(engine.aborted) == 1


def test_expect_100_continue(server: HttpServerThread) -> None:
    body = b'{"prompt":"hi"}'
    request = post("/v1/completions", body, "expect: 100-continue", "connection: close")
    with server.connect(request[: -len(body)]) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
