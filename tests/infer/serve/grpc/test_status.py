"""The status table of docs/wire.md, error by error."""

import asyncio
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2

from tk.core import errors as core
from tk.infer.serve import errors as ours
from tk.infer.serve.grpc.status import answered, status_of

CODES = {
    "CANCELLED": 1,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
}


def details(error: Exception) -> dict[str, Any]:
    found = {}
    for packed in status_of(error).details:
        name = packed.TypeName()
        message = getattr(error_details_pb2, name.removeprefix("google.rpc."))()
        packed.Unpack(message)
        found[name] = message
    return found


@pytest.mark.parametrize(
    ("error", "code", "detail_names"),
    [
        (core.InvalidRequest("x", field="n"), "INVALID_ARGUMENT", {"google.rpc.BadRequest"}),
        (core.PromptTooLong("x", field="prompt"), "INVALID_ARGUMENT", {"google.rpc.BadRequest"}),
        (core.Overloaded("x"), "RESOURCE_EXHAUSTED", {"google.rpc.RetryInfo", "google.rpc.QuotaFailure"}),
        (core.WorkerDied("x"), "UNAVAILABLE", set()),
        (core.WorkerDied("x", 2.0), "UNAVAILABLE", {"google.rpc.RetryInfo"}),
        (ours.Draining("x"), "UNAVAILABLE", {"google.rpc.RetryInfo"}),
        (ours.Loading("x"), "UNAVAILABLE", {"google.rpc.RetryInfo"}),
        (core.DeadlinePassed("x"), "DEADLINE_EXCEEDED", set()),
        (core.Cancelled("x"), "CANCELLED", set()),
        (ours.DuplicateRequest("x"), "ALREADY_EXISTS", set()),
        (ours.RoleMissing("x"), "PERMISSION_DENIED", set()),
        (ours.UnknownModel("x"), "NOT_FOUND", set()),
        (ours.NotBuilt("x"), "UNIMPLEMENTED", set()),
        (ours.NoTokenizer("x"), "FAILED_PRECONDITION", set()),
        (core.TkError("x"), "INTERNAL", {"google.rpc.ErrorInfo"}),
        (ZeroDivisionError("x"), "INTERNAL", {"google.rpc.ErrorInfo"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_code_and_details(error: Exception, code: str, detail_names: set[str]) -> None:
    assert status_of(error).code == CODES[code]
    assert set(details(error)) == detail_names


def test_details_have_the_field_and_the_delay() -> None:
    bad = details(core.InvalidRequest("too many", field="n"))["google.rpc.BadRequest"].field_violations[0]
    assert (bad.field, bad.description) == ("sampling.n", "too many")
    assert details(core.Overloaded("x", 0.25))["google.rpc.RetryInfo"].retry_delay.ToMilliseconds() == 250
    info = details(ZeroDivisionError("x"))["google.rpc.ErrorInfo"]
    assert (info.reason, info.domain) == ("ZeroDivisionError", "tk.v1")


class EndedCall:
    """A call whose client has left: its status cannot be sent."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


@pytest.mark.parametrize(
    "error", [core.DeadlinePassed("x"), RuntimeError("a defect"), grpc.aio.InternalError("a message was not sent")]
)
def test_a_call_that_ended_before_its_status_counts_as_cancelled(error: Exception) -> None:
    async def call() -> None:
        async with answered(cast(grpc.aio.ServicerContext, EndedCall())):
            raise error

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(call())
