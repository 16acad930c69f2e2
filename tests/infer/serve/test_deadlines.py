"""Deadlines over an engine that hangs: every call ends at its own, by the server's clock, and leaves nothing."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from tk.infer.engine.grammar.compiler import Grammars
from tk.infer.engine.grammar.grammar import Grammar
from tk.infer.engine.request.events import Event
from tk.infer.engine.request.request import Request
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, ByteTokenizer, FakeEngine, delta, started
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.tests.infer.serve.open_inference.conftest import Calls, asking

SHORT = 0.1  # seconds
HTTP_SHORT = {"x-request-timeout": str(SHORT)}


class Gate(ByteTokenizer):
    """A byte tokenizer that holds each text until it is opened, as a very long one would be."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        self.opened.wait(WAIT_SECONDS)
        return super().encode(text, special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.opened.wait(WAIT_SECONDS)
        return super().decode(ids, skip_special_tokens)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tk")


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[HttpServerThread]:
    server = HttpServerThread(engine, http_port=0)
    yield server
    server.close()


def silent(request: Request) -> list[Event]:
    return []


def speaking(request: Request) -> list[Event]:
    return [started(request), delta("a")]


def statuses(server: HttpServerThread, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The statuses in the lines of requests, once their handlers have ended."""
    server.run(server.server.drain())
    return [record.fields["status"] for record in caplog.records if hasattr(record, "fields")]


def left(engine: FakeEngine, number: int) -> None:
    """Waits until the engine was asked to end so many requests, and has ended all."""
    engine.wait_for(lambda e: len(e.aborted) == number)
    engine.settle()
    assert engine.num_live == 0


@pytest.mark.parametrize("script", [silent, speaking])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions of two"])
def test_http_answers_at_the_deadline(
    server: HttpServerThread,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    script: Callable[[Request], list[Event]],
    is_streamed: bool,
    path: str,
) -> None:
    engine.script = script
    name, _, two = path.partition(" ")
    body = {"prompt": ["hi", "ho"] if two else "hi", "stream": is_streamed}
    answer = server.ask(name, body, HTTP_SHORT)
    if is_streamed and script is speaking:
        error = answer.events[-1]["error"]
    else:
        assert answer.status == 504
        error = answer.error
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    assert "deadline passed" in error["message"]
    left(engine, 2 if two else 1)
    assert statuses(server, caplog) == ["DEADLINE_EXCEEDED"]


def test_grpc_answers_at_the_deadline(
    server: HttpServerThread, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = speaking
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = GenerationStub(channel)
        for call in (
            lambda: list(stub.Generate(pb.GenerateRequest(text="hi"), timeout=SHORT)),
            lambda: stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=SHORT),
            lambda: stub.Score(pb.ScoreRequest(text="hi", continuation_text="ho"), timeout=SHORT),
            lambda: Calls(channel).ModelInfer(asking("hi"), timeout=SHORT),
        ):
            with pytest.raises(grpc.RpcError) as late:
                call()
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    left(engine, 4)
    assert statuses(server, caplog) == ["DEADLINE_EXCEEDED"] * 4


def test_the_timeout_of_an_inference_ends_it_alone(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = speaking
    late, patient = asking("hi", timeout=round(SHORT * 1e6)), asking("hi")
    late.id, patient.id = "late", "patient"
    with grpc.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.RpcError, match="deadline passed") as error:
            Calls(channel).ModelInfer(late, timeout=WAIT_SECONDS)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        answers = Calls(channel).ModelStreamInfer(iter([patient, late]), timeout=WAIT_SECONDS)
        said: oip.ModelStreamInferResponse = next(answer for answer in answers if answer.error_message)
        assert said.error_message.startswith("DEADLINE_EXCEEDED: ")
        assert said.infer_response.id == "late"
        assert set(engine.aborted) == {"late"}
        answers.cancel()


class HeldGrammars(Grammars):
    """Grammars that take longer than any caller waits, until they are let go."""

    def __init__(self) -> None:
        super().__init__(None, 256, ())
        self.opened = threading.Event()

    def compile(self, *given: Any, **named: Any) -> Grammar:
        self.opened.wait(WAIT_SECONDS)
        return super().compile(*given, **named)


def test_a_grammar_that_takes_longer_than_the_deadline_is_left(server: HttpServerThread, engine: FakeEngine) -> None:
    grammars = engine.grammars = HeldGrammars()
    body = {"prompt": "hi", "response_format": {"type": "json_object"}}
    assert server.ask("/v1/completions", body, HTTP_SHORT).status == 504
    grammars.opened.set()
    assert server.ask("/v1/completions", body).error["code"] == "invalid_argument", "its own error, where there is time"
    assert engine.requests == []


def test_an_operator_ends_a_request_whose_text_is_still_read(server: HttpServerThread, engine: FakeEngine) -> None:
    gate = engine.tokenizer = Gate()
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = GenerationStub(channel)
        for _ in range(2):  # its id is free at once
            call = stub.GenerateOnce.future(pb.GenerateRequest(text="hi", request_id="x"), timeout=WAIT_SECONDS)
            while not AdminStub(channel).Abort(pb.AbortRequest(request_id="x")).found:
                pass
            assert call.code() == grpc.StatusCode.CANCELLED
            assert "ended by an operator" in call.details()
    gate.opened.set()
    assert engine.requests == []


def test_a_text_that_takes_longer_than_the_deadline_is_left(
    server: HttpServerThread, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = engine.tokenizer = Gate()
    assert server.ask("/v1/completions", {"prompt": "hi"}, HTTP_SHORT).status == 504
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = GenerationStub(channel)
        for call, request in (
            (stub.GenerateOnce, pb.GenerateRequest(text="hi")),
            (stub.Tokenize, pb.TokenizeRequest(text="hi")),
            (stub.Detokenize, pb.TokenIds(ids=[97])),
        ):
            with pytest.raises(grpc.RpcError) as late:
                call(request, timeout=SHORT)
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    gate.opened.set()
    assert server.ask("/v1/completions", {"prompt": "hi"}).status == 200
    assert len(engine.requests) == 1, "those that are late are not computed"
    assert [status for status in statuses(server, caplog) if status != "DEADLINE_EXCEEDED"] == ["OK"]
