"""The log of calls: one line for each at its end, with its id, status, tokens and times.

Every call that ends with an error has a line, and every call that runs a request; those that are refused before the
engine takes a request are counted here too, so that log and metrics agree. A record of `logging` carries the values of
a line in `fields`, for formatters that write JSON.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import grpc
from google.protobuf.json_format import MessageToDict

from ....core.errors import TkError
from ....proto.v1 import generation_pb2 as pb
from ...observability.observer import Observer
from ...observability.request_record import RequestRecord
from ..status import text_for_client

_LOG: Final = logging.getLogger(__name__)
_NO_TRACE: Final[Mapping[str, str]] = MappingProxyType({})
# The caller has gone, or its deadline has passed.
_GONE: Final = (asyncio.CancelledError, grpc.aio.BaseError, ConnectionError, TimeoutError)


class RequestLog:
    """Writes the lines, and reports the calls to an observer.

    Args:
        with_prompts: whether lines have the prompts, which may be confidential.
        observer: observes the refused calls and the ends of requests.
    """

    def __init__(self, with_prompts: bool = False, observer: Observer | None = None) -> None:
        self._with_prompts, self._observer = with_prompts, observer or Observer()

    @contextmanager
    def request(
        self, method: str, principal: str, request_id: str, trace: Mapping[str, str] = _NO_TRACE
    ) -> Iterator[RequestRecord]:
        """A context around a request, at the end of which its line is written; errors pass through it.

        Args:
            method: the call.
            principal: the caller.
            request_id: the caller's name for the request, or "".
            trace: the caller's trace context.
        """
        record = RequestRecord(method, principal, request_id, trace)
        try:
            yield record
        except BaseException as error:
            self._fail(record, error)
            raise
        finally:
            record.values["total_seconds"] = round(record.seconds(), 6)
            _write(record)
            self._observer.end(record)

    @contextmanager
    def refusals(self, method: str, principal: str = "") -> Iterator[RequestRecord]:
        """A context around a part of a call that runs no request; it has a line only if a TkError ends it.

        The body may still change the record, which it gets.
        """
        record = RequestRecord(method, principal)
        try:
            yield record
        except TkError as error:
            self._fail(record, error)
            _write(record)
            raise

    def refuse(self, method: str, error: TkError) -> None:
        """Writes the line of a call that was refused before it could be read, and counts it."""
        record = RequestRecord(method)
        self._fail(record, error)
        _write(record)

    def describe(self, record: RequestRecord, *requests: pb.GenerateRequest | pb.ScoreRequest) -> None:
        """Adds the kind of a call's prompts to its record and, if they are logged, the texts, token ids or messages."""
        kinds = [each.WhichOneof("prompt") or "" for each in requests]
        if "chat" in kinds:
            record.operation = "chat"
        if self._with_prompts:
            prompts = [MessageToDict(each).get(kind) for each, kind in zip(requests, kinds, strict=True)]
            record.values["prompt"] = prompts[0] if len(prompts) == 1 else prompts

    def _fail(self, record: RequestRecord, error: BaseException) -> None:
        record.error = error
        if isinstance(error, TkError):
            record.status = error.grpc_status
            record.values["error"] = text_for_client(error)
        elif isinstance(error, _GONE):  # at the deadline gRPC and the client cancel, too
            record.status = "DEADLINE_EXCEEDED" if record.is_late else "CANCELLED"
        else:
            record.status = "INTERNAL"
        if record.is_refused and isinstance(error, TkError):
            self._observer.refuse(error)


def _write(record: RequestRecord) -> None:
    fields = {
        "request_id": record.request_id,
        "principal": record.principal,
        "method": record.method,
        "status": record.status,
        **record.values,
    }
    words = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    _LOG.info("request %s", words, extra={"fields": fields})


def _shown(value: object) -> str:
    """Returns a value in one word, or in quotes on one line."""
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.replace("-", "").isalnum() else json.dumps(text)
