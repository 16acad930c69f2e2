"""The number of connections, and their end when the server drains or stops."""

import pytest

from tk.infer.engine.request.events import Done
from tk.infer.serve.http import connection as connection_module
from tk.tests.infer.serve.fake_engine import FakeEngine, delta, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread, post, read_to_end, read_until

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_the_number_of_connections_is_bounded(server: HttpServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.http, "most_connections", 2)
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


def test_a_connection_that_is_new_when_the_server_drains_has_an_answer(
    server: HttpServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "FIRST_SECONDS", 3600)
    new, idle = server.connect(), server.connect(HEALTH)
    read_until(idle, b"}")
    server.run(server.server.drain())
    assert read_to_end(idle) == b""
    new.sendall(HEALTH)
    assert read_to_end(new).startswith(b"HTTP/1.1 503")
    for connection in (new, idle):
        connection.close()


def test_stopping_ends_streams_with_an_error(engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    server = HttpServerThread(engine, http_port=0)
    with server.connect(post("/v1/completions", b'{"prompt":"hi","stream":true}')) as stream:
        read_until(stream, b"\n\n\r\n")
        server.close()
        assert b'"code":"unavailable"' in read_to_end(stream)
    assert len(engine.aborted) == 1
