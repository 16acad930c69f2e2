"""Every row of docs/wire.md's table of statuses, provoked by a client over a scripted engine: code, details, headers.

test_admission_end_to_end.py has full queues and quotas of a real engine, test_status.py every error by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tk.core.errors import Cancelled, DeadlinePassed, Overloaded
from tk.infer.engine.request.events import Failed
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread, delta, started

HI = pb.GenerateRequest(text="hi")
USER = (("authorization", "Bearer user's"),)
OPERATOR = (("authorization", "Bearer operator's"),)


@dataclass
class Table:
    """A server with tokens, its engine, and a channel to it."""

    engine: FakeEngine
    server: ServerThread
    channel: grpc.Channel

    @property
    def generation(self) -> Any:
        return GenerationStub(self.channel)

    @property
    def admin(self) -> Any:
        return AdminStub(self.channel)

    def live(self, request_id: str) -> Any:
        """A stream of which the client has seen the first event."""
        self.engine.script = lambda request: [started(request), delta("a")]
        call = self.generation.Generate(
            pb.GenerateRequest(text="hi", request_id=request_id), metadata=USER, timeout=WAIT_SECONDS
        )
        next(call)
        return call


@pytest.fixture
def table(engine: FakeEngine, tmp_path: Path) -> Iterator[Table]:
    path = tmp_path / "tokens"
    callers = {"user's": Caller("alice", frozenset({GENERATE})), "operator's": Caller("ops", frozenset({ADMIN}))}
    path.write_text("".join(line_of(token_digest(token), caller) for token, caller in callers.items()))
    server = ServerThread(engine, tokens=path, is_loaded=False)
    with grpc.insecure_channel(server.target) as channel:
        yield Table(engine, server, channel)
    server.close()


@pytest.fixture
def serving(table: Table) -> Table:
    table.server.run(table.server.server.set_ready())
    return table


def seen(error: grpc.RpcError) -> tuple[str, dict[str, Any]]:
    """The code of an error, and its details by name."""
    status = rpc_status.from_call(error)
    details = {}
    for packed in status.details if status else ():
        name = packed.TypeName().removeprefix("google.rpc.")
        details[name] = getattr(error_details_pb2, name)()
        packed.Unpack(details[name])
    return error.code().name, details


def refused(call: Any, request: Any, metadata: Any = USER) -> tuple[str, dict[str, Any]]:
    """What a client sees of a call that is refused before it is admitted; of a stream, too."""

    def whole() -> None:
        answer = call(request, metadata=metadata, timeout=WAIT_SECONDS)
        list(answer if hasattr(answer, "__next__") else [answer])

    with pytest.raises(grpc.RpcError) as caught:
        whole()
    assert "x-request-id" not in dict(caught.value.initial_metadata()), "a refusal has trailers only"
    return seen(caught.value)


def both(table: Table, request: Any) -> tuple[str, dict[str, Any]]:
    """What a client sees of a refused Generate, which is the same for GenerateOnce."""
    code, details = refused(table.generation.Generate, request)
    assert refused(table.generation.GenerateOnce, request) == (code, details)
    return code, details


UNKNOWN = pb.GenerateRequest(text="hi", sampling=pb.Sampling.FromString(b"\x98\x06\x01"))  # field 99


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (pb.GenerateRequest(text="hi", sampling={"top_p": 7.0}), "sampling.top_p", "top_p"),
        (pb.GenerateRequest(), "prompt", "no prompt"),
        (pb.GenerateRequest(text="hi", request_id="a b"), "request_id", "must be at most 128"),
        (pb.GenerateRequest(tokens={"ids": [5] * 128}), "prompt", "max_model_len = 128"),
        (UNKNOWN, "sampling.99", "field number 99"),
    ],
)
def test_bad_fields_and_requests_that_never_fit(
    serving: Table, request_: pb.GenerateRequest, field: str, words: str
) -> None:
    code, details = both(serving, request_)
    assert code == "INVALID_ARGUMENT"
    [violation] = details["BadRequest"].field_violations
    assert violation.field == field
    assert words in violation.description


@pytest.mark.parametrize("subject", ["queue", "principal:alice"])
def test_a_full_queue_and_a_full_quota(serving: Table, subject: str) -> None:
    serving.engine.refusal = Overloaded("Full.", 2.5, subject)
    code, details = both(serving, HI)
    assert code == "RESOURCE_EXHAUSTED"
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2500
    assert details["QuotaFailure"].violations[0].subject == subject


def test_loading(table: Table) -> None:
    code, details = both(table, HI)
    assert (code, list(details)) == ("UNAVAILABLE", ["RetryInfo"])
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000


def test_a_dead_worker_for_good_and_for_now(serving: Table) -> None:
    serving.engine.die(retry_after=3.0)
    code, details = both(serving, HI)
    assert (code, list(details)) == ("UNAVAILABLE", ["RetryInfo"])
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 3000
    serving.engine.recover()
    call = serving.live("x")
    serving.engine.die()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert seen(caught.value) == ("UNAVAILABLE", {})


def test_draining(serving: Table) -> None:
    serving.admin.Drain(pb.DrainRequest(), metadata=OPERATOR, timeout=WAIT_SECONDS)
    code, details = both(serving, HI)
    assert (code, list(details)) == ("UNAVAILABLE", ["RetryInfo"])
    assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0


def test_a_first_token_that_is_not_expected_in_time(serving: Table) -> None:
    serving.engine.refusal = DeadlinePassed("Too late.")
    assert both(serving, HI) == ("DEADLINE_EXCEEDED", {})


def test_a_deadline_that_passes(serving: Table) -> None:
    serving.engine.script = lambda request: [started(request), Failed(DeadlinePassed("too late"))]
    with pytest.raises(grpc.RpcError) as caught:
        list(serving.generation.Generate(HI, metadata=USER, timeout=WAIT_SECONDS))
    assert seen(caught.value) == ("DEADLINE_EXCEEDED", {})
    serving.engine.script = lambda request: [started(request)]
    with pytest.raises(grpc.RpcError) as caught:
        serving.generation.GenerateOnce(HI, metadata=USER, timeout=0.05)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    serving.engine.wait_for(lambda e: e.num_live == 0)


def test_cancelled_by_the_client_by_an_operator_and_by_the_engine(serving: Table) -> None:
    call = serving.live("x")
    call.cancel()
    assert call.code() == grpc.StatusCode.CANCELLED
    serving.engine.wait_for(lambda e: e.num_live == 0)
    endings: list[Callable[[], object]] = [
        lambda: serving.admin.Abort(
            pb.AbortRequest(request_id="y", principal="alice"), metadata=OPERATOR, timeout=WAIT_SECONDS
        ),
        lambda: serving.engine.emit(("alice", "y"), Failed(Cancelled("ended"))),
    ]
    for end in endings:
        call = serving.live("y")
        end()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert seen(caught.value) == ("CANCELLED", {})
        serving.engine.settle()


def test_a_duplicate_live_id(serving: Table) -> None:
    call = serving.live("x")
    assert both(serving, pb.GenerateRequest(text="hi", request_id="x")) == ("ALREADY_EXISTS", {})
    call.cancel()


def test_no_token_a_bad_one_and_a_wrong_role(serving: Table) -> None:
    for metadata in ((), (("authorization", "Bearer x"),), (("authorization", "user's"),)):
        assert refused(serving.generation.Generate, HI, metadata)[0] == "UNAUTHENTICATED"
        assert refused(serving.admin.GetLoad, pb.GetLoadRequest(), metadata)[0] == "UNAUTHENTICATED"
    assert refused(serving.admin.GetLoad, pb.GetLoadRequest(), USER)[0] == "PERMISSION_DENIED"
    assert refused(serving.generation.GenerateOnce, HI, OPERATOR)[0] == "PERMISSION_DENIED"
    assert both(serving, pb.GenerateRequest(text="hi", priority=1)) == ("PERMISSION_DENIED", {})


def test_an_unknown_model(serving: Table) -> None:
    assert both(serving, pb.GenerateRequest(text="hi", model="other")) == ("NOT_FOUND", {})


def test_what_is_known_and_not_built(serving: Table) -> None:
    assert refused(serving.admin.Reload, pb.ReloadRequest(checkpoint="x"), OPERATOR) == ("UNIMPLEMENTED", {})


def test_a_conversation_without_a_template_and_a_text_without_a_tokenizer(serving: Table) -> None:
    chat = pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "hi"}]})
    assert both(serving, chat) == ("FAILED_PRECONDITION", {})
    serving.engine.tokenizer = None
    assert both(serving, HI) == ("FAILED_PRECONDITION", {})


def test_a_fault_of_ours(serving: Table) -> None:
    def broken(request: Any) -> list[Any]:
        raise KeyError("private")

    serving.engine.script = broken
    code, details = refused(serving.generation.GenerateOnce, HI)
    assert (code, list(details)) == ("INTERNAL", ["ErrorInfo"])
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("KeyError", "tk.v1")
