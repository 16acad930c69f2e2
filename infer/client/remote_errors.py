"""The client's side of the status table: it rebuilds the server's error, as far as possible, from a gRPC status."""

from typing import Any, Final

import grpc
from google.rpc import error_details_pb2, status_pb2

from ...core.errors import Cancelled, DeadlinePassed, InvalidRequest, Overloaded, TkError

_DETAILS_KEY: Final = "grpc-status-details-bin"


class RemoteError(TkError):
    """A call that a server refused or could not finish.

    Attributes:
        status: the name of the gRPC status, for example "NOT_FOUND".
        retry_after: the number of seconds after which the client should try again, if the server sent it.
    """

    def __init__(self, message: str, status: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Unavailable(RemoteError):
    """A call to an address without a server, or to a server that is draining or has lost a worker."""

    grpc_status = "UNAVAILABLE"


def error_from_rpc(error: grpc.RpcError, target: str) -> TkError:
    """Rebuilds the error of a status that names its class; other statuses become Unavailable or RemoteError."""
    status: str = error.code().name
    message = f"{target}: {error.details() or status}"
    details = _details(error)
    retry = details.get("RetryInfo")
    retry_after = retry.retry_delay.ToNanoseconds() / 1e9 if retry else None
    match status:
        case "INVALID_ARGUMENT":
            bad = details.get("BadRequest")
            return InvalidRequest(message, field=bad.field_violations[0].field if bad else "")
        case "RESOURCE_EXHAUSTED" if retry_after is not None:
            return Overloaded(message, retry_after)
        case "CANCELLED":
            return Cancelled(message)
        case "DEADLINE_EXCEEDED":
            return DeadlinePassed(message)
        case "UNAVAILABLE":
            return Unavailable(message, status, retry_after)
    return RemoteError(f"{message} ({status})", status, retry_after)


def _details(error: grpc.RpcError) -> dict[str, Any]:
    """Returns the google.rpc details that the client uses, by name."""
    raw = next((value for key, value in error.trailing_metadata() or () if key == _DETAILS_KEY), b"")
    found: dict[str, Any] = {}
    for packed in status_pb2.Status.FromString(raw).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            detail = kind()
            if packed.Unpack(detail):
                found[kind.DESCRIPTOR.name] = detail
    return found
