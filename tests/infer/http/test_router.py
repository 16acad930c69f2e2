"""Paths, methods, types of bodies, tokens and roles."""

from pathlib import Path

import pytest

from tk.infer.server.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.tests.infer.http.http_server import Answer, HttpServerThread
from tk.tests.infer.server.fake_engine import FakeEngine

BODY = {"model": "fake", "prompt": "hi"}


def asked(server: HttpServerThread, **headers: str) -> Answer:
    return server.ask("/v1/completions", BODY, {key.replace("_", "-"): value for key, value in headers.items()})


def row(answer: Answer) -> tuple[int, str, str]:
    return answer.status, answer.error["type"], answer.error["code"]


def test_tokens_and_roles(engine: FakeEngine, tmp_path: Path) -> None:
    callers = {"one": Caller("alice", frozenset({GENERATE})), "two": Caller("ops", frozenset({ADMIN}))}
    lines = [line_of(token_digest(token), caller) for token, caller in callers.items()]
    (tmp_path / "tokens").write_text("".join(lines))
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/fake", "/nothing"):
        for method in ("GET", "POST"):
            answer = server.ask(path, b"{" if method == "POST" else None)
            assert row(answer) == (401, "authentication_error", "unauthenticated"), path
            assert answer.headers["www-authenticate"] == "Bearer"
    assert server.ask("/health").status == 200
    assert row(asked(server, authorization="Bearer other"))[0] == 401
    assert row(asked(server, authorization="Bearer two")) == (403, "permission_error", "permission_denied")
    assert asked(server, authorization="Bearer one").status == 200
    assert [request.principal for request in engine.requests] == ["alice"]
    server.close()


@pytest.mark.parametrize(
    ("method", "path", "content_type", "status"),
    [
        ("GET", "/nothing", "application/json", 404),
        ("GET", "/v1/completions", "application/json", 405),
        ("POST", "/health", "application/json", 405),
        ("POST", "/v1/completions", "text/plain", 415),
        ("OPTIONS", "/v1/completions", "application/json", 405),
    ],
)
def test_what_is_no_use_of_the_port(
    server: HttpServerThread, method: str, path: str, content_type: str, status: int
) -> None:
    answer = server.ask(path, b"{}", {"content-type": content_type}, method)
    assert row(answer) == (status, "invalid_request_error", f"http_{status}")
    assert ("allow" in answer.headers) == (status == 405)
