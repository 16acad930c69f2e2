"""Sizes, times and the end of connections."""

import json

import pytest

from tk.infer.engine.request.events import Event
from tk.infer.serve.http import connection as connection_module
from tk.infer.serve.http.connection import MAX_BODY_BYTES
from tk.tests.infer.serve.fake_engine import FakeEngine, delta, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread, post, read_to_end, read_until

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_requests_follow_each_other_on_a_connection(server: HttpServerThread) -> None:
    with server.connect(HEALTH) as connection:
        read_until(connection, b"}")
        connection.sendall(post("/v1/completions", b'{"prompt":"hi"}') + HEALTH + HEALTH)  # all before an answer
        answers = read_until(connection, b'{"status":"serving"}')
        while answers.count(b"HTTP/1.1 200") < 3:
            answers += read_until(connection, b'{"status":"serving"}')
        assert answers.count(b'"text":"abc"') == 1


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), ("/", 200), ("/none", 404), ("/v1/completions", 405)]
)
def test_the_reply_to_head_is_that_to_get_without_its_body(server: HttpServerThread, path: str, status: int) -> None:
    head = HEALTH.replace(b"GET /health", f"HEAD {path}".encode())
    with server.connect(head + HEALTH) as connection:
        replies = read_until(connection, b'{"status":"serving"}')
        assert replies.startswith(b"HTTP/1.1 %d " % status)
        first, second = replies.split(b"\r\n\r\n", 1)
        assert int(first.partition(b"content-length: ")[2].partition(b"\r\n")[0]) > 0
        assert second.startswith(b"HTTP/1.1 200 ")
        connection.sendall(head + b"no request\r\n\r\n")
        assert b"HTTP/1.1 400" in read_until(connection, b"}}")


@pytest.mark.parametrize("size", [MAX_BODY_BYTES, MAX_BODY_BYTES + 1])
def test_the_size_of_a_body_is_bounded(server: HttpServerThread, size: int) -> None:
    body = json.dumps({"prompt": "hi"}).encode().ljust(size)
    status = b"HTTP/1.1 200" if size <= MAX_BODY_BYTES else b"HTTP/1.1 413"
    with server.connect(post("/v1/completions", body, "connection: close")) as whole:
        assert read_to_end(whole).startswith(status)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:500_000], body[500_000:]))
    with server.connect(head + b"transfer-encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n") as chunked:
        assert read_to_end(chunked).startswith(status)


def test_a_stated_size_is_refused_before_the_body_comes(server: HttpServerThread) -> None:
    for length in (MAX_BODY_BYTES + 1, 10**18):
        with server.connect(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length
        ) as one:
            assert read_to_end(one).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("name", "data", "answer"),
    [
        ("HEADER_SECONDS", b"GET /health HTTP/1.1\r\nho", b"HTTP/1.1 408"),
        (
            "BODY_SECONDS",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
            b"HTTP/1.1 408",
        ),
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


def test_expect_100_continue(server: HttpServerThread) -> None:
    body = b'{"prompt":"hi"}'
    request = post("/v1/completions", body, "expect: 100-continue", "connection: close")
    with server.connect(request[: -len(body)]) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
