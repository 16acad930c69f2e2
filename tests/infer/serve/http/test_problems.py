"""Every row of the status table, provoked by a client of HTTP."""

import json
from typing import Any

import pytest

from tk.core.errors import Cancelled, DeadlinePassed, Overloaded, WorkerDied
from tk.infer.engine.grammar.compiler import MissingExtra
from tk.infer.engine.request.events import Failed
from tk.tests.infer.serve.fake_engine import FakeEngine, started
from tk.tests.infer.serve.http.http_server import Answer, HttpServerThread, post, read_to_end

BODY = {"model": "fake", "prompt": "hi"}


def asked(server: HttpServerThread, **headers: str) -> Answer:
    return server.ask("/v1/completions", BODY, {key.replace("_", "-"): value for key, value in headers.items()})


def row(answer: Answer) -> tuple[int, str, str]:
    return answer.status, answer.error["type"], answer.error["code"]


def test_invalid_argument(server: HttpServerThread) -> None:
    answer = server.ask("/v1/completions", BODY | {"top_p": 7})
    assert row(answer) == (400, "invalid_request_error", "invalid_argument")
    assert answer.error["param"] == "top_p"


def test_messages_name_fields_as_callers_of_this_dialect_know_them(server: HttpServerThread) -> None:
    answer = server.ask("/v1/completions", BODY | {"max_tokens": 0})
    assert answer.error["param"] == "max_tokens"
    assert answer.error["message"] == "max_tokens is 0; it must be 1 or more, or unset."
    chat = {"messages": [{"role": "user", "content": "x"}] * 2000}
    answer = server.ask("/v1/chat/completions", chat)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "chat.messages" not in answer.error["message"]


def test_a_full_queue_says_when_to_come_back(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.refusal = Overloaded("the queue is full", 2.2)
    answer = asked(server)
    assert row(answer) == (429, "rate_limit_error", "resource_exhausted")
    assert answer.headers["retry-after"] == "3"


def test_dead_workers(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.refusal = WorkerDied("worker 0 is gone", 4.0)
    answer = asked(server)
    assert row(answer) == (503, "server_error", "unavailable")
    assert answer.headers["retry-after"] == "4"
    engine.refusal = WorkerDied("worker 0 is gone")
    assert asked(server).headers["retry-after"] == "5", "a supervisor starts the server again"


def test_loading(engine: FakeEngine) -> None:
    server = HttpServerThread(engine, is_loaded=False, http_port=0)
    assert row(asked(server)) == (503, "server_error", "unavailable")
    assert server.ask("/v1/models").status == 503
    assert (server.ask("/health").status, server.ask("/health").json) == (503, {"status": "loading"})
    assert (server.ask("/v1/models").headers["retry-after"], server.ask("/health").headers["retry-after"]) == ("1", "5")
    server.run(server.server.set_ready())
    assert (server.ask("/health").status, asked(server).status) == (200, 200)
    server.close()


def test_draining(server: HttpServerThread) -> None:
    server.run(server.server.drain())
    answer = asked(server)
    assert row(answer) == (503, "server_error", "unavailable")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"
    health = server.ask("/health")
    assert (health.status, health.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DeadlinePassed("too late"), (504, "timeout_error", "deadline_exceeded")),
        (Cancelled("ended"), (499, "request_cancelled", "cancelled")),
    ],
)
def test_a_request_that_ends_before_its_first_event(
    server: HttpServerThread, engine: FakeEngine, error: Any, expected: tuple[int, str, str]
) -> None:
    engine.script = lambda request: [Failed(error)]
    assert row(asked(server, x_request_timeout="2.5")) == expected
    deadline = engine.requests[0].deadline
    assert deadline is not None


def test_a_wrong_timeout(server: HttpServerThread) -> None:
    for given in ("0", "-1", "soon", "nan"):
        assert asked(server, x_request_timeout=given).status == 400


def test_a_duplicate_id(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    with server.connect(post("/v1/completions", b'{"prompt":"hi"}', "x-request-id: mine")):
        engine.wait_for(lambda e: e.num_live == 1)
        assert row(asked(server, x_request_id="mine")) == (409, "invalid_request_error", "already_exists")


def test_an_unknown_model(server: HttpServerThread) -> None:
    answer = server.ask("/v1/completions", BODY | {"model": "other"})
    assert row(answer) == (404, "invalid_request_error", "model_not_found")
    assert row(server.ask("/v1/models/other")) == (404, "invalid_request_error", "model_not_found")
    assert server.ask("/v1/models/fake").json["max_model_len"] == 128


def test_text_without_a_tokenizer(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.tokenizer = None
    assert row(asked(server)) == (400, "invalid_request_error", "failed_precondition")
    assert server.ask("/v1/completions", {"prompt": [5]}).status == 200


def test_a_part_that_is_not_installed(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.refusal = MissingExtra("json_schema needs the extra `structured`.", field="json_schema")
    answer = asked(server)
    assert row(answer) == (501, "invalid_request_error", "unimplemented")
    assert answer.error["param"] == "response_format"
    assert answer.error["message"] == "response_format needs the extra `structured`."


def test_a_conversation_without_a_chat_template(server: HttpServerThread) -> None:
    answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert row(answer) == (400, "invalid_request_error", "failed_precondition")
    assert "chat template" in answer.error["message"]


def test_a_fault_of_ours_says_nothing_private(server: HttpServerThread, engine: FakeEngine) -> None:
    def broken(request: Any) -> list[Any]:
        raise KeyError("private")

    engine.script = broken
    answer = asked(server)
    assert row(answer) == (500, "server_error", "internal")
    assert b"private" not in answer.body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\x01\x02\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nhost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"A" * 40_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 8_000, 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n", 413),
    ],
)
def test_what_is_no_http_is_answered_in_the_same_shape_and_closed(
    server: HttpServerThread, data: bytes, status: int
) -> None:
    with server.connect(data) as connection:
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, f"http_{status}")


def test_every_503_says_when_to_try_again(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.die(retry_after=2.5)
    engine.settle()
    for answer in (asked(server), server.ask("/health")):
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")
