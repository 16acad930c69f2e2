"""Paths, methods, types of bodies, tokens and roles."""

import logging
import re
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tk.infer.engine.request.events import Event
from tk.infer.engine.request.request import Request
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.infer.serve.http.connection import MAX_BODY_BYTES
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, delta, started, whole_answer
from tk.tests.infer.serve.http.http_server import Answer, HttpServerThread, post, read_to_end

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


def id_of(answer: bytes) -> str:
    found = re.search(rb"\r\nx-request-id: (\w+)\r\n", answer)
    assert found is not None, answer
    return found[1].decode()


def test_every_call_has_one_line_and_refusals_are_counted_once(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="tk")
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of(token_digest("one"), Caller("alice", frozenset({GENERATE}))))
    server = HttpServerThread(engine, http_port=0, metrics_port=0, tokens=tokens)
    known, path = {"authorization": "Bearer one", "x-request-id": "mine"}, "/v1/completions"
    first = server.ask(path, BODY).headers["x-request-id"]
    server.ask("/load", headers=known)
    server.ask("/nothing", headers=known)
    server.ask(path, b"{", known)
    server.ask(path, {"prompt": "hi", "tools": [{}]}, known)
    server.ask(path, {"prompt": ["hi", []]}, known)  # the first of two is admitted, the second is not
    server.ask("/v1/models/other", headers=known)
    ids = list[str]()
    with server.connect(post(path, b" " * (MAX_BODY_BYTES + 1))) as large:
        ids.append(id_of(read_to_end(large)))
    with server.connect(b"secret words\r\n\r\n") as strange:
        ids.append(id_of(read_to_end(strange)))
    monkeypatch.setattr(server.http, "most_connections", 0)
    with server.connect() as third:
        ids.append(id_of(read_to_end(third)))
    monkeypatch.undo()
    statuses = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "UNAVAILABLE")
    refused = [
        ("POST /v1/completions", "UNAUTHENTICATED", "", first),
        ("GET /load", "PERMISSION_DENIED", "alice", "mine"),
        ("GET (unknown)", "INVALID_ARGUMENT", "alice", "mine"),
        ("POST /v1/completions", "INVALID_ARGUMENT", "alice", "mine"),
        ("POST /v1/completions", "INVALID_ARGUMENT", "alice", "mine"),
        ("POST /v1/completions", "INVALID_ARGUMENT", "alice", "mine"),
        ("GET /v1/models/", "NOT_FOUND", "alice", "mine"),
        *(("HTTP", status, "", name) for status, name in zip(statuses, ids, strict=True)),
    ]
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    rows = [(line["method"], line["status"], line["principal"], line["request_id"]) for line in fields]
    assert rows == refused
    assert "secret" not in caplog.text
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS) as response:
        found = re.findall(r'tk_request_rejections_total{.*status="(\w+)"} (\d+)', response.read().decode())
    assert {status: int(count) for status, count in found} == Counter(status for _, status, _, _ in refused)

    caplog.clear()
    for stream in (False, True):
        assert server.ask(path, {"prompt": ["hi", "ho"], "stream": stream}, known).status == 200
    server.run(server.server.drain())
    [whole, streamed] = [record.fields for record in caplog.records if hasattr(record, "fields")]
    differing = {"total_seconds": 0, "time": "", "client": ""}
    assert whole | differing == streamed | differing
    assert whole["client"].startswith("127.0.0.1:")
    assert (whole["status"], whole["request_id"], whole["prompt_tokens"]) == ("OK", "mine", 6)
    assert whole["completion_tokens"] == 6
    server.close()


def faults(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Returns the level of each error in the log, and the class of the exception whose traceback it has."""
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    return [
        (record.levelname, record.exc_info[0].__name__) for record in errors if record.exc_info and record.exc_info[0]
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_a_handler_is_a_500_and_a_traceback_and_the_server_goes_on(
    server: HttpServerThread, engine: FakeEngine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def fail(request: Request) -> list[Event]:
        raise ZeroDivisionError("secret")

    engine.script = fail
    answer = server.ask("/v1/completions", {**BODY, "stream": stream})
    assert row(answer) == (500, "server_error", "internal")
    assert "ZeroDivisionError" in answer.error["message"]
    assert "secret" not in answer.error["message"], "the text may be confidential"
    assert faults(caplog) == [("ERROR", "ZeroDivisionError")]
    engine.script = whole_answer
    assert asked(server).status == 200


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event_and_a_traceback(
    server: HttpServerThread, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda request: [started(request), delta("ab"), replace(delta("c"), text=cast(str, object()))]
    *_, last = server.ask("/v1/completions", {**BODY, "stream": True}).events
    assert last["error"]["code"] == "internal"
    assert faults(caplog) == [("ERROR", "TypeError")]
    engine.wait_for(lambda engine: engine.num_live == 0)
    engine.script = whole_answer
    assert asked(server).status == 200


def test_a_fault_in_the_thread_that_builds_a_grammar_is_a_500_and_a_traceback(
    server: HttpServerThread,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars, "compile", fail)
        answer = server.ask("/v1/completions", {**BODY, "response_format": {"type": "json_object"}})
    assert row(answer) == (500, "server_error", "internal")
    assert faults(caplog) == [("ERROR", "ZeroDivisionError")]
    assert engine.requests == []
    assert asked(server).status == 200
