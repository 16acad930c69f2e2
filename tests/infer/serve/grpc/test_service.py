"""The calls of tk.v1.Generation over a scripted engine: what reaches the engine, what comes back, how calls end."""

import logging
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tk.core.errors import DeadlinePassed, InvalidRequest, Overloaded
from tk.infer.engine.request.events import Done, Event, Failed
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.every_option import EVERY_OPTION
from tk.tests.infer.serve.fake_engine import (
    INFO,
    WAIT_SECONDS,
    ByteTokenizer,
    FakeEngine,
    ServerThread,
    delta,
    finished,
    started,
    whole_answer,
)


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it encodes."""

    texts = 0

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        self.texts += 1
        return super().encode(text, special_tokens)


def refused(call: Any, request: Any) -> grpc.RpcError:
    """The error of a call, unary or streaming."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call(request, timeout=WAIT_SECONDS))
    return caught.value


def detail(error: grpc.RpcError, kind: type) -> Any:
    """The google.rpc detail of that kind."""
    for packed in rpc_status.from_call(error).details:
        message = kind()
        if packed.Unpack(message):
            return message
    raise AssertionError(f"{error} has no {kind.__name__}")


def shown(responses: Any) -> list[tuple[str, int, str]]:
    """Events as (kind, index, text)."""
    return [
        (kind, getattr(getattr(response, kind), "index", 0), getattr(getattr(response, kind), "text", ""))
        for response in responses
        for kind in [response.WhichOneof("event")]
    ]


def test_stream_is_started_then_deltas_of_all_samples_then_finished(stub: Any, engine: FakeEngine) -> None:
    call = stub.Generate(pb.GenerateRequest(text="hi", sampling={"n": 2, "seed": 5}), timeout=WAIT_SECONDS)
    events = list(call)
    assert shown(events)[0] == ("started", 0, "")
    assert [e[:2] for e in shown(events)[-2:]] == [("finished", 0), ("finished", 1)]
    for index in (0, 1):
        assert "".join(text for kind, i, text in shown(events) if (kind, i) == ("delta", index)) == "abc"
    assert events[0].started.seed == 5
    assert (events[0].started.prompt_tokens, events[0].started.step) == (3, INFO.step)
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert engine.num_live == 0
    assert engine.aborted == []


def test_once_gives_the_same_as_the_stream(stub: Any) -> None:
    result = stub.GenerateOnce(pb.GenerateRequest(text="hi", sampling={"n": 2}), timeout=WAIT_SECONDS)
    assert [(c.index, c.text, list(c.token_ids)) for c in result.choices] == [(i, "abc", [97, 98, 99]) for i in (0, 1)]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (4, 6)
    assert (result.seed, result.step) == (99, INFO.step)


def test_unset_fields_have_the_defaults_of_sampling_params(stub: Any, engine: FakeEngine) -> None:
    stub.GenerateOnce(pb.GenerateRequest(text="hi", sampling={}, stopping={}, output={}), timeout=WAIT_SECONDS)
    stub.GenerateOnce(pb.GenerateRequest(tokens={"ids": [5]}), timeout=WAIT_SECONDS)
    assert [request.params for request in engine.requests] == [SamplingParams(), SamplingParams()]
    assert [request.prompt for request in engine.requests] == [(1, 104, 105), (5,)]


def test_every_option_reaches_the_engine(stub: Any, engine: FakeEngine) -> None:
    request = pb.GenerateRequest(
        text="hi",
        no_special_tokens=True,
        priority=-3,
        sampling={
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.25,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {4: -2.0, 0: 1.0},
            "seed": 2**64 - 1,
            "n": 2,
        },
        stopping={
            "max_new_tokens": 11,
            "min_new_tokens": 2,
            "stop": ["x", "yz"],
            "stop_token_ids": [4, 0],
            "ignore_eos": True,
        },
        output={"logprobs": 0, "prompt_logprobs": 3, "keep_special_tokens": True, "include_stop": True},
    )
    stub.GenerateOnce(request, timeout=WAIT_SECONDS)
    [seen] = engine.requests
    assert seen.params == EVERY_OPTION
    assert (seen.prompt, seen.priority) == ((104, 105), -3)


def test_deadline_reaches_the_engine(stub: Any, engine: FakeEngine) -> None:
    stub.GenerateOnce(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    stub.GenerateOnce(pb.GenerateRequest(text="hi"))
    with_deadline, without = engine.requests
    assert with_deadline.deadline is not None
    assert without.deadline is None


def test_cache_options_reach_the_engine(stub: Any, engine: FakeEngine) -> None:
    for cache in (None, pb.CacheOptions(salt="s"), pb.CacheOptions(bypass=True)):
        stub.GenerateOnce(pb.GenerateRequest(text="hi", cache=cache), timeout=WAIT_SECONDS)
    found = [(request.cache.salt, request.cache.bypass) for request in engine.requests]
    assert found == [("", False), ("s", False), ("", True)]


@pytest.mark.parametrize(("default", "given", "expected"), [(10, None, 10), (10, 20, 20), (500, None, 125)])
def test_server_default_of_new_tokens(engine: FakeEngine, default: int, given: int | None, expected: int) -> None:
    server = ServerThread(engine, default_max_new_tokens=default)
    try:
        with grpc.insecure_channel(server.target) as channel:
            stopping = {} if given is None else {"max_new_tokens": given}
            GenerationStub(channel).GenerateOnce(pb.GenerateRequest(text="hi", stopping=stopping), timeout=WAIT_SECONDS)
    finally:
        server.close()
    assert engine.requests[0].params.max_new_tokens == expected


def test_request_id_is_the_clients_or_made_by_the_server(stub: Any) -> None:
    for given in ("my.id:1-_", ""):
        call = stub.Generate(pb.GenerateRequest(text="hi", request_id=given), timeout=WAIT_SECONDS)
        metadata = dict(call.initial_metadata())
        first = next(call)
        assert first.started.request_id == metadata["x-request-id"]
        assert first.started.request_id == given or (not given and len(first.started.request_id) >= 16)
        list(call)


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "ü", "a\n"])
def test_malformed_request_id_is_refused(stub: Any, engine: FakeEngine, bad: str) -> None:
    error = refused(stub.Generate, pb.GenerateRequest(text="hi", request_id=bad))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "request_id"
    assert engine.requests == []


def test_request_id_is_free_again_once_the_engine_is_done_with_it(stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="same"), timeout=WAIT_SECONDS)
    next(call)
    error = refused(stub.GenerateOnce, pb.GenerateRequest(text="hi", request_id="same"))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert engine.num_live == 1, "the refused duplicate left the first alone"
    engine.emit("same", finished(), Done())
    list(call)
    again = stub.Generate(pb.GenerateRequest(text="hi", request_id="same"), timeout=WAIT_SECONDS)
    assert next(again).started.request_id == "same"
    again.cancel()


def test_client_cancel_aborts_in_the_engine(stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="mine"))
    next(call)
    call.cancel()
    engine.wait_for(lambda e: e.num_live == 0)
    assert set(engine.aborted) == {"mine"}


def test_deadline_aborts_in_the_engine(stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request)]
    for seconds in (0.3, 3.0, WAIT_SECONDS):  # a deadline may pass before the engine has the request
        call = stub.Generate(pb.GenerateRequest(text="hi", request_id="late"), timeout=seconds)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        engine.wait_for(lambda e: e.num_live == 0)
        if engine.requests:
            break
    assert set(engine.aborted) == {"late"}


def test_a_request_that_the_engine_ends_by_its_deadline_has_the_status_of_a_deadline(
    stub: Any, engine: FakeEngine
) -> None:
    """The client's own clock hides this status, unless it is behind the server's."""
    engine.script = lambda request: [started(request), Failed(DeadlinePassed("too late"))]
    assert refused(stub.Generate, pb.GenerateRequest(text="hi")).code() == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
def test_lost_connection_aborts_in_the_engine(server: ServerThread, engine: FakeEngine, method: str) -> None:
    engine.script = lambda request: [started(request)]
    channel = grpc.insecure_channel(server.target)
    rpc = getattr(GenerationStub(channel), method)
    call = rpc(pb.GenerateRequest(text="hi")) if method == "Generate" else rpc.future(pb.GenerateRequest(text="hi"))
    engine.wait_for(lambda e: e.num_live == 1)
    channel.close()
    engine.wait_for(lambda e: e.num_live == 0)
    assert engine.aborted == [engine.requests[0].request_id]
    assert call.code() == grpc.StatusCode.CANCELLED


def test_engine_refusals_are_answered_with_their_details(stub: Any, engine: FakeEngine) -> None:
    engine.refusal = InvalidRequest("top_p is 7.", field="top_p")
    error = refused(stub.Generate, pb.GenerateRequest(text="hi"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "sampling.top_p"
    assert error.details() == "sampling.top_p is 7."

    engine.refusal = Overloaded("The queue is full.", retry_after=2.5)
    error = refused(stub.GenerateOnce, pb.GenerateRequest(text="hi", request_id="again"))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500
    assert detail(error, error_details_pb2.QuotaFailure).violations[0].subject == "queue"

    engine.refusal = None
    assert stub.GenerateOnce(pb.GenerateRequest(text="hi", request_id="again")).choices[0].text == "abc"


def test_a_slow_reader_never_holds_up_the_engine(stub: Any, engine: FakeEngine) -> None:
    """Without joined deltas or with a bounded queue that blocks, the engine's thread would wait for the reader."""
    num_deltas = 20_000
    engine.script = lambda request: [started(request), *[delta("0123456789")] * num_deltas, finished(), Done()]
    call = stub.Generate(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    next(call)
    engine.wait_for(lambda e: e.num_live == 0)
    responses = list(call)
    assert "".join(response.delta.text for response in responses) == "0123456789" * num_deltas
    assert len(responses) < num_deltas


def test_cancel_while_the_server_waits_for_a_slow_reader(stub: Any, engine: FakeEngine) -> None:
    """Messages larger than the connection's window: the handler hangs in a write when the cancel comes."""
    large: list[Event] = [delta("x" * 600_000), finished(index=1)]
    engine.script = lambda request: [started(request), *large * 10]
    call = stub.Generate(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    next(call)
    call.cancel()
    engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 1


def test_worker_death_ends_streams_unavailable(stub: Any, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    call = stub.Generate(pb.GenerateRequest(text="hi"), timeout=WAIT_SECONDS)
    next(call)
    engine.die()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert refused(stub.Generate, pb.GenerateRequest(text="hi")).code() == grpc.StatusCode.UNAVAILABLE


def test_a_fault_of_ours_is_internal_with_error_info(stub: Any, engine: FakeEngine) -> None:
    def broken(request: Any) -> list[Any]:
        raise KeyError("private")

    engine.script = broken
    error = refused(stub.GenerateOnce, pb.GenerateRequest(text="hi"))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert detail(error, error_details_pb2.ErrorInfo).reason == "KeyError"
    assert "private" not in error.details()


@pytest.mark.parametrize(
    ("request_fields", "status"),
    [
        ({}, "INVALID_ARGUMENT"),
        ({"tokens": {}}, "INVALID_ARGUMENT"),
        ({"text": "", "no_special_tokens": True}, "INVALID_ARGUMENT"),
        ({"tokens": {"ids": [5] * 128}}, "INVALID_ARGUMENT"),
        ({"text": "hi", "sampling": {"n": 17}}, "INVALID_ARGUMENT"),
        ({"text": "hi", "model": "other"}, "NOT_FOUND"),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, "FAILED_PRECONDITION"),
        ({"chat": {}}, "INVALID_ARGUMENT"),
        ({"chat": {"messages": [{}] * 1025}}, "INVALID_ARGUMENT"),
        ({"text": "hi", "sampling": {"json_schema": ""}}, "INVALID_ARGUMENT"),
        ({"text": "hi", "sampling": {"regex": "a*"}}, "INVALID_ARGUMENT"),
        ({"text": "hi", "sampling": {"grammar": "start: /a/"}, "stopping": {"ignore_eos": True}}, "INVALID_ARGUMENT"),
    ],
)
def test_requests_that_never_reach_the_engine(
    stub: Any, engine: FakeEngine, request_fields: dict[str, Any], status: str
) -> None:
    error = refused(stub.Generate, pb.GenerateRequest(**request_fields))
    assert error.code().name == status
    assert engine.requests == []


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_a_text_that_no_tokens_can_hold_is_refused_before_it_is_tokenized(
    stub: Any, engine: FakeEngine, method: str
) -> None:
    tokenizer = CountingTokenizer()
    engine.tokenizer, most = tokenizer, INFO.max_model_len * tokenizer.longest_token_bytes
    request = pb.GenerateRequest if method == "Generate" else pb.TokenizeRequest
    error = refused(getattr(stub, method), request(text="é" * (most // 2) + "x"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "text"
    assert tokenizer.texts == 0
    assert len(stub.Tokenize(pb.TokenizeRequest(text="é" * (most // 2)), timeout=WAIT_SECONDS).ids) == most + 1
    refused(stub.Generate, pb.GenerateRequest(text="x" * most, sampling={"top_p": 7.0}))
    assert tokenizer.texts == 1, "wrong options are refused before that too"


def test_named_model_is_served(stub: Any) -> None:
    assert stub.GenerateOnce(pb.GenerateRequest(text="hi", model="fake", cache={})).choices[0].text == "abc"


def test_tokenize_and_detokenize(stub: Any) -> None:
    assert list(stub.Tokenize(pb.TokenizeRequest(text="hé")).ids) == [1, 104, 195, 169]
    assert list(stub.Tokenize(pb.TokenizeRequest(text="h", no_special_tokens=True)).ids) == [104]
    assert stub.Detokenize(pb.TokenIds(ids=[1, 104, 195, 169])).text == "\x01hé"


def test_without_a_tokenizer_ids_still_work(stub: Any, engine: FakeEngine) -> None:
    engine.tokenizer = None
    assert refused(stub.Generate, pb.GenerateRequest(text="hi")).code() == grpc.StatusCode.FAILED_PRECONDITION
    assert refused(stub.Tokenize, pb.TokenizeRequest(text="hi")).code() == grpc.StatusCode.FAILED_PRECONDITION
    assert stub.GenerateOnce(pb.GenerateRequest(tokens={"ids": [1]})).choices[0].text == "abc"


def test_model_info_has_every_field(stub: Any) -> None:
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    seen = {field.name: getattr(info, field.name) for field in info.DESCRIPTOR.fields}
    lists = {name: tuple(seen[name]) for name in ("eos_token_ids", "aliases")}
    assert replace(INFO, **seen | lists) == INFO
    assert set(seen) == set(INFO.__dataclass_fields__)


def test_request_beyond_four_mebibytes_is_refused(stub: Any, engine: FakeEngine) -> None:
    error = refused(stub.GenerateOnce, pb.GenerateRequest(text="x" * (4 << 20)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert engine.requests == []


def test_answers_that_could_pass_16_mebibytes_are_refused_before_they_are_queued(stub: Any, engine: FakeEngine) -> None:
    engine.info = replace(INFO, max_model_len=1 << 17)
    scored = pb.GenerateRequest(tokens={"ids": [5] * 40_000}, output={"prompt_logprobs": 20})
    many = pb.GenerateRequest(text="hi", sampling={"n": 16}, output={"logprobs": 20})
    for request, field in ((scored, "output.prompt_logprobs"), (many, "stopping.max_new_tokens")):
        error = refused(stub.GenerateOnce, request)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == field
        assert engine.requests == []
    for request in (scored, many):
        assert list(stub.Generate(request, timeout=WAIT_SECONDS)), "a stream has several messages"


def test_a_refusal_has_trailers_only(stub: Any, engine: FakeEngine) -> None:
    """Proxies and gRPC's own retries take a call that has initial metadata for one that has begun."""
    engine.refusal = Overloaded("The queue is full.")
    for call in (stub.Generate, stub.GenerateOnce):
        error = refused(call, pb.GenerateRequest(text="hi", request_id="a"))
        assert "x-request-id" not in dict(error.initial_metadata() or ())


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the class of each exception that the log reports as an error with its traceback."""
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    return [record.exc_info[0].__name__ for record in errors if record.exc_info and record.exc_info[0]]


def fail(*_: object) -> Any:
    raise ZeroDivisionError("secret")


@pytest.mark.parametrize("name", ["Generate", "GenerateOnce", "Score"])
def test_a_fault_in_a_handler_is_internal_and_a_traceback_and_the_server_goes_on(
    stub: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    engine.script = fail
    score = pb.ScoreRequest(text="a", continuation_text="b")
    request = score if name == "Score" else pb.GenerateRequest(text="a")
    call = getattr(stub, name)
    error = refused(call if name == "Generate" else lambda *args, **options: [call(*args, **options)], request)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details()), "the text may be confidential"
    assert detail(error, error_details_pb2.ErrorInfo).reason == "ZeroDivisionError"
    assert tracebacks(caplog) == ["ZeroDivisionError"]
    engine.script = whole_answer
    assert list(stub.Generate(pb.GenerateRequest(text="a"), timeout=WAIT_SECONDS))


def test_a_fault_in_the_middle_of_a_stream_is_internal_and_a_traceback(
    stub: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda request: [started(request), delta("ab"), replace(delta("c"), text=cast(str, object()))]
    error = refused(stub.Generate, pb.GenerateRequest(text="a"))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert tracebacks(caplog) == ["TypeError"]
    engine.wait_for(lambda engine: engine.num_live == 0)


def test_a_fault_in_the_thread_that_builds_a_grammar_is_internal_and_a_traceback(
    stub: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.GenerateRequest(text="a")
    request.sampling.regex = "a+"
    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars, "compile", fail)
        error = refused(stub.Generate, request)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert tracebacks(caplog) == ["ZeroDivisionError"]
    assert engine.requests == []
    assert list(stub.Generate(pb.GenerateRequest(text="a"), timeout=WAIT_SECONDS))
