"""Random framings to the HTTP port: no request runs that a strict parser does not find in the same bytes."""

import socket

import pytest

from tk.infer.serve.http.connection import HttpConnection
from tk.infer.serve.http.framing import HttpRequest
from tk.infer.serve.http.router import HttpRouter
from tk.tests.infer.serve.http.framings import Framings, Judged, judged
from tk.tests.infer.serve.http.http_server import HttpServerThread


@pytest.mark.parametrize(("seed", "count"), [(1, 250), pytest.param(2, 5000, marks=pytest.mark.matrix)])
def test_what_runs_is_what_a_strict_parser_finds(
    server: HttpServerThread, monkeypatch: pytest.MonkeyPatch, seed: int, count: int
) -> None:
    ran, framings, answer = list[Judged](), Framings(seed, "mine", "localhost"), HttpRouter.__call__

    async def seen(router: HttpRouter, request: HttpRequest, reply: HttpConnection) -> None:
        ran.append(Judged(f"{request.method} {request.path}", request.header("x-request-id")))
        await answer(router, request, reply)

    monkeypatch.setattr(HttpRouter, "__call__", seen)
    num_ran = num_refused = 0
    for number in range(count):
        data = framings.stream(f"m{number}")
        with server.connect(data) as connection:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        assert ran == judged(data)[: len(ran)], data
        num_ran, num_refused = num_ran + len(ran), num_refused + (not ran)
        ran.clear()
    assert num_ran > count / 4, "many are requests"
    assert num_refused > count / 4, "and many are none"
