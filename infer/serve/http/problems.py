"""Errors in OpenAI's shape: {"error": {message, type, param, code}}, with the HTTP status of each gRPC status."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from ....core.errors import InvalidRequest, TkError, UnknownAdapter
from ..errors import UnknownModel, text_for_client

Headers = Sequence[tuple[str, str]]  # names and values
# The name of the gRPC status -> HTTP status and OpenAI's type of error.
_STATUSES: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": (400, "invalid_request_error"),
        "FAILED_PRECONDITION": (400, "invalid_request_error"),
        "UNAUTHENTICATED": (401, "authentication_error"),
        "PERMISSION_DENIED": (403, "permission_error"),
        "NOT_FOUND": (404, "invalid_request_error"),
        "ALREADY_EXISTS": (409, "invalid_request_error"),
        "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
        "CANCELLED": (499, "request_cancelled"),
        "INTERNAL": (500, "server_error"),
        "UNIMPLEMENTED": (501, "invalid_request_error"),
        "UNAVAILABLE": (503, "server_error"),
        "DEADLINE_EXCEEDED": (504, "timeout_error"),
    }
)
RETRY_SECONDS: Final = 5  # where nothing is known: a server that a supervisor starts again needs some
# The names of the engine's and the wire's fields in OpenAI's dialect, where they differ.
_PARAMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "json_schema": "response_format",
        "text": "prompt",
        "chat": "messages",
    }
)


class HttpProblem(TkError):
    """A request that is no valid use of HTTP, or for something that is not there.

    Attributes:
        status: the HTTP status.
        headers: more headers of the reply.
    """

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, message: str, status: int, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status, self.headers = status, list(headers)

    @property
    def log_form(self) -> str:
        return f"{super().log_form} {self.status}"


class NoConnectionLeft(HttpProblem):
    """A connection above the number that the port takes."""

    grpc_status = "UNAVAILABLE"


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    return error.status if isinstance(error, HttpProblem) else _STATUSES[_grpc_status(error)][0]


def body_of(error: Exception) -> dict[str, Any]:
    """Returns the body of an error; one that is no TkError is a defect of the server, whose text stays in its log."""
    name, param = _grpc_status(error), None
    if isinstance(error, InvalidRequest) and error.field:
        param = _PARAMS.get(error.field, error.field)
        error = error.renamed(param)
    code = f"http_{error.status}" if isinstance(error, HttpProblem) else name.lower()
    if isinstance(error, UnknownModel | UnknownAdapter):  # an adapter is a model in this dialect
        code = "model_not_found"  # OpenAI's, by which clients choose another model
    return {"error": {"message": text_for_client(error), "type": _STATUSES[name][1], "param": param, "code": code}}


def headers_of(error: Exception) -> Headers:
    """Returns the headers that an error adds to its reply."""
    status = status_of(error)
    own = error.headers if isinstance(error, HttpProblem) else ()
    challenge = [("www-authenticate", "Bearer")] if status == 401 else []
    return [*own, *retry_headers(status, getattr(error, "retry_after", None)), *challenge]


def retry_headers(status: int, seconds: float | None = None) -> Headers:
    """Returns the header that says when to try again; each 429 and each 503 has one.

    Args:
        status: the status of the reply.
        seconds: the time that is known; None = none is.
    """
    if status not in (429, 503):
        return []
    return [("retry-after", str(RETRY_SECONDS if seconds is None else max(1, math.ceil(seconds))))]


def _grpc_status(error: Exception) -> str:
    return error.grpc_status if isinstance(error, TkError) else "INTERNAL"
