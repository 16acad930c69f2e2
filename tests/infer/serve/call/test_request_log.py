"""One line per request at its end, whatever that is; prompts only where the operator asks for them."""

import asyncio
import datetime
import logging
import re
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tk.core.errors import Overloaded
from tk.core.repeats import WINDOW, Repeats
from tk.infer.engine.request.events import Done, Finished, Timing
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.infer.serve.call.request_log import RequestLog
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import (
    WAIT_SECONDS,
    FakeEngine,
    ServerThread,
    delta,
    finished,
    started,
    whole_answer,
)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tk")


def lines(server: ServerThread, caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of all requests, once their handlers have ended."""
    server.run(server.server.drain())
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


def test_a_request_that_completes(
    server: ServerThread, stub: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    timing = Timing(0.1, 0.2, 0.3, preemptions=1)
    engine.script = lambda request: [
        replace(event, timing=replace(timing, preemptions=1 + event.index)) if isinstance(event, Finished) else event
        for event in whole_answer(request)
    ]
    list(
        stub.Generate(
            pb.GenerateRequest(text="secret", request_id="mine", sampling={"n": 2}, stopping={"max_new_tokens": 9}),
            timeout=WAIT_SECONDS,
        )
    )
    result = stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    streamed, once = lines(server, caplog)
    assert streamed.pop("total_seconds") > 0
    assert datetime.datetime.fromisoformat(streamed.pop("time")).tzinfo is not None
    assert re.fullmatch(r"127\.0\.0\.1:\d+", streamed.pop("client"))
    assert 0 < streamed.pop("deadline_seconds") <= WAIT_SECONDS + 0.2
    assert streamed == {
        "request_id": "mine",
        "principal": "",
        "method": "Generate",
        "status": "OK",
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "completion_tokens": 6,
        "queue_seconds": 0.1,
        "first_token_seconds": 0.2,
        "n": 2,
        "max_new_tokens": 9,
        "finish_reasons": "length,length",
        "preemptions": 3,
        "step": 7,
    }
    assert (once["method"], once["request_id"]) == ("GenerateOnce", result.request_id)
    assert "secret" not in caplog.text
    [text] = [message for message in caplog.messages if "mine" in message]
    assert re.match(
        r'request time="[^"]*" request_id=mine principal="" client="[^"]*" method=Generate status=OK ', text
    )


def test_a_line_names_the_adapter_that_a_request_got(
    server: ServerThread, stub: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.adapters.load("sql", Path("/one"))
    stub.GenerateOnce(pb.GenerateRequest(text="hi", adapter="sql"), timeout=WAIT_SECONDS)
    with pytest.raises(grpc.RpcError):
        stub.GenerateOnce(pb.GenerateRequest(text="hi", adapter="secret"), timeout=WAIT_SECONDS)
    taken, refused = lines(server, caplog)
    assert (taken["adapter"], taken["adapter_sha256"]) == ("sql", "sha256 of one")
    assert ("adapter" in refused, refused["error"]) == (False, "UnknownAdapter")
    assert "secret" not in caplog.text


def test_requests_that_do_not(
    server: ServerThread, stub: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(**fields: Any) -> None:
        with pytest.raises(grpc.RpcError):
            stub.GenerateOnce(pb.GenerateRequest(text="hi", **fields), timeout=WAIT_SECONDS)

    def broken(request: Any) -> list[Any]:
        raise KeyError("private")

    fails(request_id="a", model="other")
    engine.refusal = Overloaded("Full.")
    fails(request_id="b")
    engine.refusal = None
    engine.script = lambda request: [started(request), delta("abc")]
    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="c"), timeout=WAIT_SECONDS)
    assert [next(call).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
    call.cancel()
    engine.wait_for(lambda e: e.num_live == 0)
    engine.script = broken
    fails(request_id="d")
    seen = {line["request_id"]: line for line in lines(server, caplog)}
    assert {name: line["status"] for name, line in seen.items()} == {
        "a": "NOT_FOUND",
        "b": "RESOURCE_EXHAUSTED",
        "c": "CANCELLED",
        "d": "INTERNAL",
    }
    assert seen["b"]["error"] == "Overloaded"
    assert seen["c"]["completion_tokens"] == 3
    assert "completion_tokens" not in seen["a"]


def test_prompts_are_logged_where_the_operator_asks(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    server = ServerThread(engine, log_prompts=True)
    engine.script = lambda request: [started(request), finished(), Done()]
    prompts = [pb.GenerateRequest(text="a\nb"), pb.GenerateRequest(tokens={"ids": [5, 6]})]
    with grpc.insecure_channel(server.target) as channel:
        for prompt in prompts:
            GenerationStub(channel).GenerateOnce(prompt, timeout=WAIT_SECONDS)
    assert [line["prompt"] for line in lines(server, caplog)] == ["a\nb", {"ids": [5, 6]}]
    assert all("\n" not in message for message in caplog.messages if message.startswith("request "))
    server.close()


def test_an_error_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with RequestLog().call("Generate") as record:
            record.runs, record.principal = True, "alice"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert 'principal=alice client="" method=Generate status=INTERNAL total_seconds=' in caplog.text


def test_an_error_is_named_without_a_word_of_its_caller(
    server: ServerThread, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="hi", request_id="two secrets"), timeout=WAIT_SECONDS)
    assert "two secrets" in caught.value.details(), "the caller reads his own words"
    [line] = lines(server, caplog)
    assert (line["error"], line["error_field"], line["error_value"]) == ("InvalidRequest", "request_id", "str of 11")
    assert line["request_id"] == ""
    assert "secrets" not in caplog.text


def test_operators_who_log_prompts_read_messages_too(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    server = ServerThread(engine, log_prompts=True)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError):
        GenerationStub(channel).GenerateOnce(pb.GenerateRequest(text="hi", model="secret"), timeout=WAIT_SECONDS)
    [line] = lines(server, caplog)
    assert "'secret' is not served here" in line["error"]
    server.close()


def test_refusals_of_a_kind_have_one_line_a_minute_and_requests_one_each(
    server: ServerThread, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        for model in ("another", f"{number}"):
            with pytest.raises(grpc.RpcError):
                stub.GenerateOnce(pb.GenerateRequest(text="hi", model=model), timeout=WAIT_SECONDS)
        stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    with pytest.raises(grpc.RpcError):
        stub.GenerateOnce(pb.GenerateRequest(), timeout=WAIT_SECONDS)
    before = Counter(line["status"] for line in lines(server, caplog))
    assert before == {"NOT_FOUND": 1, "OK": 20, "INVALID_ARGUMENT": 1}
    server.run(server.server.stop())
    *_, last = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert (last["status"], last["repeats"]) == ("NOT_FOUND", 38)  # 40 less the first and this one


def test_lines_of_a_flood_come_when_its_minute_is_over(caplog: pytest.LogCaptureFixture) -> None:
    class QuickLoop(asyncio.SelectorEventLoop):
        _added = 0.0

        def time(self) -> float:
            return super().time() + self._added

    now = 0.0
    log, loop = RequestLog(), QuickLoop()
    log._repeats = Repeats(lambda: now)

    async def flood() -> None:
        nonlocal now
        for _ in range(10):
            log.refuse("HTTP", Overloaded("Full."))
        now, loop._added = WINDOW, WINDOW
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(flood())
    loop.close()
    assert [vars(record)["fields"].get("repeats") for record in caplog.records] == [None, 8]


ROWS = [
    ("GenerateOnce", "UNAUTHENTICATED", ""),
    ("GenerateOnce", "PERMISSION_DENIED", "ops"),
    ("GenerateOnce", "INVALID_ARGUMENT", "alice"),  # an unknown field
    ("Tokenize", "INVALID_ARGUMENT", "alice"),  # damaged bytes
    ("GenerateOnce", "INVALID_ARGUMENT", "alice"),  # no prompt
    ("Score", "INVALID_ARGUMENT", "alice"),
    ("GenerateOnce", "RESOURCE_EXHAUSTED", "alice"),
    ("Detokenize", "INVALID_ARGUMENT", "alice"),
    ("GenerateOnce", "UNAVAILABLE", "alice"),
]


def test_every_refusal_has_one_line_and_is_counted_once(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callers = {"one": Caller("alice", frozenset({GENERATE})), "two": Caller("ops", frozenset({ADMIN}))}
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(line_of(token_digest(token), caller) for token, caller in callers.items()))
    server = ServerThread(engine, tokens=tokens, metrics_port=0)
    good = pb.GenerateRequest(text="hi").SerializeToString()
    with grpc.insecure_channel(server.target) as channel:

        def refused(method: str, message: bytes, token: str = "one") -> None:
            metadata = (("authorization", f"Bearer {token}"),)
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/tk.v1.Generation/{method}")(message, metadata=metadata, timeout=WAIT_SECONDS)

        refused("GenerateOnce", good, "unknown")
        refused("GenerateOnce", good, "two")
        refused("GenerateOnce", good + b"\xea\x04\x00")
        refused("Tokenize", b"\x0a\xff")
        refused("GenerateOnce", b"")
        refused("Score", b"")
        engine.refusal = Overloaded("Full.")
        refused("GenerateOnce", good)
        refused("Detokenize", pb.TokenIds(ids=[1] * (4 << 20)).SerializeToString()[: 3 << 20])
        server.run(server.server.drain())
        refused("GenerateOnce", good)
    seen = [(line["method"], line["status"], line["principal"]) for line in lines(server, caplog)]
    assert seen == ROWS
    assert counted(server) == Counter(status for _, status, _ in ROWS)
    server.close()


def counted(server: ServerThread) -> dict[str, int]:
    """The refusals that Prometheus reads, by status."""
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_SECONDS) as response:
        text = response.read().decode()
    found = re.findall(r'tk_request_rejections_total{.*status="(\w+)"} (\d+)', text)
    return {status: int(count) for status, count in found}
