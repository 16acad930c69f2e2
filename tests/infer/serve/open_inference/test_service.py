"""The calls of inference.GRPCInferenceService over a scripted engine: answers, pieces, statuses, and how calls end."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tk.core.errors import DeadlinePassed, Overloaded
from tk.infer.engine.request.events import Done, Failed
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.infer.serve.open_inference.service import MAX_AT_ONCE
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread, delta, finished, started
from tk.tests.infer.serve.open_inference.conftest import WAIT_SECONDS, Calls, asking, texts


def refused(call: Any, *arguments: Any, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=WAIT_SECONDS, **options)
    return caught.value


def details(error: grpc.RpcError) -> list[str]:
    """The kinds of the details of an error."""
    return [packed.type_url.rpartition(".")[2] for packed in rpc_status.from_call(error).details]


def test_its_package_is_not_in_the_pool_that_all_libraries_share() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")


def test_health_and_metadata_of_a_ready_server(calls: Calls) -> None:
    assert calls.ServerLive(oip.ServerLiveRequest(), timeout=WAIT_SECONDS).live
    assert calls.ServerReady(oip.ServerReadyRequest(), timeout=WAIT_SECONDS).ready
    assert calls.ModelReady(oip.ModelReadyRequest(name="fake", version="7"), timeout=WAIT_SECONDS).ready
    assert calls.ServerMetadata(oip.ServerMetadataRequest(), timeout=WAIT_SECONDS).name == "tk"
    assert calls.ModelMetadata(oip.ModelMetadataRequest(), timeout=WAIT_SECONDS).name == "fake"
    for name, version in (("llama", ""), ("fake", "6")):
        for call, kind in ((calls.ModelReady, oip.ModelReadyRequest), (calls.ModelMetadata, oip.ModelMetadataRequest)):
            assert refused(call, kind(name=name, version=version)).code() == grpc.StatusCode.NOT_FOUND


def test_health_before_and_after_service(engine: FakeEngine) -> None:
    server = ServerThread(engine, is_loaded=False)
    with grpc.insecure_channel(server.target) as channel:
        calls = Calls(channel)

        def health() -> tuple[bool, bool, bool]:
            live = calls.ServerLive(oip.ServerLiveRequest(), timeout=WAIT_SECONDS).live
            ready = calls.ServerReady(oip.ServerReadyRequest(), timeout=WAIT_SECONDS).ready
            return live, ready, calls.ModelReady(oip.ModelReadyRequest(), timeout=WAIT_SECONDS).ready

        assert health() == (True, False, False)
        for call, request in ((calls.ModelMetadata, oip.ModelMetadataRequest()), (calls.ModelInfer, asking("a"))):
            assert refused(call, request).code() == grpc.StatusCode.UNAVAILABLE
        server.run(server.server.set_ready())
        assert health() == (True, True, True)
        server.run(server.server.drain())
        assert health() == (True, False, False)
        draining = refused(calls.ModelInfer, asking("a"))
        assert (draining.code(), details(draining)) == (grpc.StatusCode.UNAVAILABLE, ["RetryInfo"])
    server.close()


def test_infer_answers_with_the_request_id(calls: Calls, engine: FakeEngine) -> None:
    answer, call = calls.ModelInfer.with_call(asking("hi", n=2, max_tokens=3, top_p=0.5), timeout=WAIT_SECONDS)
    [request] = engine.requests
    assert request.prompt == (1, 104, 105)
    assert (request.params.n, request.params.max_new_tokens, request.params.top_p) == (2, 3, 0.5)
    assert (texts(answer), texts(answer, "finish_reason")) == (["abc", "abc"], ["length", "length"])
    assert dict(call.initial_metadata())["x-request-id"] == answer.id == request.request_id
    assert (answer.model_name, answer.model_version) == ("fake", "7")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"top_p": 2.0}, "parameters.top_p"),
        ({"n": 17}, "parameters.n"),
        ({"max_tokens": 0}, "parameters.max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "parameters.min_tokens"),
        ({"stop": "[" + ",".join(['"a"'] * 17) + "]"}, "parameters.stop"),
        ({"length": 3}, "parameters.length"),
    ],
)
def test_a_wrong_parameter_is_named(calls: Calls, engine: FakeEngine, change: dict[str, Any], field: str) -> None:
    error = refused(calls.ModelInfer, asking("a", **change))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field} ")
    [packed] = rpc_status.from_call(error).details
    detail = error_details_pb2.BadRequest()
    assert packed.Unpack(detail)
    assert detail.field_violations[0].field == field
    assert engine.requests == []
    assert not error.initial_metadata(), "a refusal has trailers only"


def test_other_fields_are_named_too(calls: Calls) -> None:
    long, named, model, version = asking("a" * 200), asking("a"), asking("a"), asking("a")
    named.id, model.model_name, version.model_version = "a name", "llama", "8"
    for request, code, text in (
        (long, grpc.StatusCode.INVALID_ARGUMENT, "200 bytes"),
        (named, grpc.StatusCode.INVALID_ARGUMENT, "id is 'a name'"),
        (model, grpc.StatusCode.NOT_FOUND, "'llama' is not served"),
        (version, grpc.StatusCode.NOT_FOUND, "Version '8'"),
    ):
        error = refused(calls.ModelInfer, request)
        assert error.code() == code
        assert text in error.details()


def test_unknown_fields_are_refused_in_calls_and_streams(channel: grpc.Channel) -> None:
    unknown = asking("a").SerializeToString() + b"\xfa\x06\x01a"
    service = "/inference.GRPCInferenceService"
    for error in (
        refused(channel.unary_unary(f"{service}/ModelInfer"), unknown),
        refused(lambda *a, **k: list(channel.stream_stream(f"{service}/ModelStreamInfer")(*a, **k)), iter([unknown])),
    ):
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "field number 111" in error.details()


def test_statuses_of_the_engine_are_those_of_generate(calls: Calls, engine: FakeEngine) -> None:
    engine.refusal = Overloaded("full", retry_after=3.0)
    full = refused(calls.ModelInfer, asking("a"))
    assert (full.code(), details(full)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, ["RetryInfo", "QuotaFailure"])
    engine.refusal = None
    engine.script = lambda request: [started(request), Failed(DeadlinePassed("late"))]
    assert refused(calls.ModelInfer, asking("a")).code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_deadline_is_that_of_the_call_or_of_the_request(calls: Calls, engine: FakeEngine) -> None:
    calls.ModelInfer(asking("a"))
    calls.ModelInfer(asking("a", timeout=3_600_000_000))
    calls.ModelInfer(asking("a", timeout=3_600_000_000), timeout=WAIT_SECONDS)
    never, own, calls_own = [request.deadline for request in engine.requests]
    assert never is None
    assert own is not None
    assert calls_own is not None
    assert own - calls_own > 3000


def test_a_cancelled_call_ends_its_request(calls: Calls, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    call = calls.ModelInfer.future(asking("a"), timeout=WAIT_SECONDS)
    engine.wait_for(lambda engine: engine.num_live == 1)
    call.cancel()
    engine.wait_for(lambda engine: len(engine.aborted) == 1)


class Stream:
    """A ModelStreamInfer call that the test feeds."""

    def __init__(self, calls: Calls, **options: Any) -> None:
        self._requests: queue.SimpleQueue[oip.ModelInferRequest | None] = queue.SimpleQueue()
        self.call = calls.ModelStreamInfer(self._sent(), timeout=WAIT_SECONDS, **options)

    def send(self, *requests: oip.ModelInferRequest | None) -> None:
        for request in requests:
            self._requests.put(request)

    def _sent(self) -> Iterator[oip.ModelInferRequest]:
        while (request := self._requests.get()) is not None:
            yield request


def named(name: str, **parameters: Any) -> oip.ModelInferRequest:
    request = asking("a", **parameters)
    request.id = name
    return request


def test_a_stream_has_the_pieces_of_all_its_requests(calls: Calls, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    stream = Stream(calls)
    stream.send(named("one"), named("two"), None)
    first = [next(stream.call).infer_response for _ in range(2)]
    assert {answer.id for answer in first} == {"one", "two"}, "they run at the same time"
    for name in ("two", "one"):
        engine.emit(name, delta("b"), finished(), Done())
    rest = [answer.infer_response for answer in stream.call]
    joined: dict[str, str] = {}
    for answer in (*first, *rest):
        joined[answer.id] = joined.get(answer.id, "") + texts(answer)[0]
    assert joined == {"one": "ab", "two": "ab"}
    last = [answer.id for answer in rest if answer.parameters["triton_final_response"].bool_param]
    assert sorted(last) == ["one", "two"]
    assert stream.call.code() == grpc.StatusCode.OK


def test_an_error_ends_one_request_of_a_stream_and_no_other(calls: Calls, engine: FakeEngine) -> None:
    stream = Stream(calls)
    stream.send(named("bad", top_p=2.0))
    wrong = next(stream.call)
    assert wrong.error_message.startswith("INVALID_ARGUMENT: parameters.top_p is 2")
    assert wrong.infer_response.id == "bad"
    stream.send(named("good"), None)
    good = list(stream.call)
    assert {answer.error_message for answer in good} == {""}
    assert "".join(texts(answer.infer_response)[0] for answer in good) == "abc"


def test_a_stream_runs_so_many_requests_at_a_time(calls: Calls, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    stream = Stream(calls)
    names = [f"r{number}" for number in range(MAX_AT_ONCE + 2)]
    stream.send(*map(named, names), None)
    for _ in range(MAX_AT_ONCE):
        next(stream.call)
    assert engine.num_live == MAX_AT_ONCE
    for name in names[:2]:
        engine.emit(name, finished(), Done())
    engine.wait_for(lambda engine: len(engine.requests) == MAX_AT_ONCE + 2)
    for name in names[2:]:
        engine.emit(name, finished(), Done())
    assert len([answer for answer in stream.call if answer.infer_response.parameters["seed"].uint64_param]) == 18


def test_a_cancelled_stream_ends_all_its_requests(calls: Calls, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    stream = Stream(calls)
    stream.send(named("one"), named("two"))
    for _ in range(2):
        next(stream.call)
    stream.call.cancel()
    engine.wait_for(lambda engine: sorted(engine.aborted) == ["one", "two"])
    stream.send(None)


def test_a_dead_worker_ends_the_requests_of_a_stream_and_new_ones(calls: Calls, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    stream = Stream(calls)
    stream.send(named("one"))
    next(stream.call)
    engine.die(retry_after=2.0)
    ended = next(stream.call)
    stream.send(named("two"), None)
    [refused_too] = stream.call
    assert [each.infer_response.id for each in (ended, refused_too)] == ["one", "two"]
    assert {each.error_message for each in (ended, refused_too)} == {"UNAVAILABLE: worker 0 is gone"}


def test_a_fault_of_the_server_ends_the_stream_and_its_requests(calls: Calls, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("a")]
    stream = Stream(calls)
    stream.send(named("one"))
    next(stream.call)
    engine.emit("one", delta("b", index=5))  # no such sample
    stream.send(None)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream.call)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    engine.wait_for(lambda engine: engine.aborted == ["one"])


def test_every_call_needs_a_token_with_the_role(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    callers = {"user's": Caller("alice", frozenset({GENERATE})), "operator's": Caller("ops", frozenset({ADMIN}))}
    path.write_text("".join(line_of(token_digest(token), caller) for token, caller in callers.items()))
    server = ServerThread(engine, tokens=path)
    user, operator = ((("authorization", f"Bearer {name}"),) for name in ("user's", "operator's"))
    with grpc.insecure_channel(server.target) as channel:
        calls = Calls(channel)
        every = [
            (calls.ServerLive, oip.ServerLiveRequest()),
            (calls.ServerReady, oip.ServerReadyRequest()),
            (calls.ModelReady, oip.ModelReadyRequest()),
            (calls.ServerMetadata, oip.ServerMetadataRequest()),
            (calls.ModelMetadata, oip.ModelMetadataRequest()),
            (calls.ModelInfer, asking("a")),
            (lambda request, **options: list(calls.ModelStreamInfer(iter([request]), **options)), asking("a")),
        ]
        for call, request in every:
            assert refused(call, request).code() == grpc.StatusCode.UNAUTHENTICATED
            assert refused(call, request, metadata=operator).code() == grpc.StatusCode.PERMISSION_DENIED
            call(request, metadata=user, timeout=WAIT_SECONDS)
    assert [request.principal for request in engine.requests] == ["alice", "alice"]
    server.close()


def test_the_log_has_a_line_for_each_request(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    server = ServerThread(engine, log_prompts=True)
    with caplog.at_level("INFO"), grpc.insecure_channel(server.target) as channel:
        calls = Calls(channel)
        calls.ModelInfer(named("one"), timeout=WAIT_SECONDS)
        list(calls.ModelStreamInfer(iter([named("two", top_p=2.0)]), timeout=WAIT_SECONDS))
    server.close()
    one, two = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert (one["method"], one["status"], one["request_id"], one["prompt"]) == ("ModelInfer", "OK", "one", "a")
    assert one["completion_tokens"] == 3
    assert (two["method"], two["status"], two["request_id"]) == ("ModelStreamInfer", "INVALID_ARGUMENT", "two")


def test_a_parameter_names_the_adapter(calls: Calls, engine: FakeEngine) -> None:
    for given, status, words in (
        ("sql", "NOT_FOUND", "Adapter 'sql' is not loaded"),
        (3, "INVALID_ARGUMENT", "parameters.adapter is 3; it must be the name of a loaded adapter."),
    ):
        error = refused(calls.ModelInfer, asking("hi", adapter=given))
        assert error.code().name == status
        assert error.details().startswith(words)
    engine.adapters.load("sql", Path("/one"))
    answer = calls.ModelInfer(asking("hi", adapter="sql"), timeout=WAIT_SECONDS)
    assert answer.parameters["adapter_sha256"].string_param == "sha256 of one"
    assert "adapter_sha256" not in calls.ModelInfer(asking("hi"), timeout=WAIT_SECONDS).parameters
