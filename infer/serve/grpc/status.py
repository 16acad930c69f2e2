"""The gRPC status of an error: the code comes from the error's class, the details from the table in this module."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ....core.errors import InvalidRequest, Overloaded, TkError, WorkerDied
from ...client.wire import field_to_wire
from ..errors import Draining, Loading, text_for_client

ERROR_DOMAIN: Final = "tk.v1"
_LOG: Final = logging.getLogger(__name__)


def _field_violation(error: InvalidRequest) -> list[Any]:
    violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text_for_client(error))
    return [error_details_pb2.BadRequest(field_violations=[violation])]


def _retry_info(error: Overloaded | Loading | Draining | WorkerDied) -> list[Any]:
    if error.retry_after is None:
        return []
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(round(error.retry_after * 1e9))
    return [error_details_pb2.RetryInfo(retry_delay=delay)]


def _full_queue(error: Overloaded) -> list[Any]:
    violation = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=text_for_client(error))
    return [*_retry_info(error), error_details_pb2.QuotaFailure(violations=[violation])]


_DETAILS: Final[Mapping[type[TkError], Callable[[Any], list[Any]]]] = MappingProxyType(
    {
        InvalidRequest: _field_violation,
        Overloaded: _full_queue,
        **dict.fromkeys((Loading, Draining, WorkerDied), _retry_info),
    }
)


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error; an error that is no TkError is a defect of the server."""
    name = error.grpc_status if isinstance(error, TkError) else "INTERNAL"
    if isinstance(error, InvalidRequest):
        error = error.renamed(field_to_wire(error.field))
    details = next((build(error) for kind, build in _DETAILS.items() if isinstance(error, kind)), [])
    if name == "INTERNAL":
        details = [error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN)]
    status = status_pb2.Status(code=grpc.StatusCode[name].value[0], message=text_for_client(error))
    for detail in details:
        status.details.add().Pack(detail)
    return status


@asynccontextmanager
async def answered(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status of the error that the body raises; logs defects of the server.

    Raises:
        asyncio.CancelledError: the call had ended before its message or status could be sent.
    """
    try:
        try:
            yield
        except grpc.aio.BaseError:  # the server or the client has ended the call already
            raise
        except Exception as error:
            if not isinstance(error, TkError):
                _LOG.exception("a call failed by a fault of the server")
            status = rpc_status.to_status(status_of(error))
            await abort(context, status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError as error:  # the client's deadline passed, or it left, just now: no fault to log
        raise asyncio.CancelledError("the call has ended") from error


def client_of(context: grpc.aio.ServicerContext) -> str:
    """Returns the address of a call's client, HOST:PORT, as the log has it."""
    kind, _, address = unquote(context.peer()).partition(":")
    return address if kind in ("ipv4", "ipv6") else kind


async def abort(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, details: str, metadata: tuple[Any, ...] = ()
) -> None:
    """Ends a call with a status; always raises.

    A call keeps the error that ends it, which has the frames that it passed, which have the call and its message: a
    ring that only a search for garbage finds. So the error lets go of the frames when it has passed them all.
    """
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.AbortError as error:
        asyncio.get_running_loop().call_soon(_let_go, error)
        raise


def _let_go(error: BaseException) -> None:
    """Takes from an error what it came through."""
    error.__traceback__ = error.__context__ = None
