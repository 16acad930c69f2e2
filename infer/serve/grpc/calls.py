"""Calls over gRPC: each is identified once, has one record in the log, and ends with a status."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ..access.callers import Callers
from ..access.tokens import GENERATE, Caller
from ..call.deadline import deadline_of, ended_by
from ..call.request_ids import METADATA_KEY, is_id
from ..call.request_log import RequestLog
from ..metrics.request_record import RequestRecord
from .messages import INLINE_BYTES, ServeCall, make_handler, only_message, read_message
from .server import add_methods
from .status import answered, client_of


@dataclass(frozen=True)
class GrpcCall:
    """A call of a caller who may make it.

    Attributes:
        context: gRPC's side of the call.
        caller: the caller.
        record: what the log says of the call.
        deadline: the value of time.monotonic() after which the caller no longer waits, or None.
    """

    context: grpc.aio.ServicerContext
    caller: Caller
    record: RequestRecord
    deadline: float | None

    def run(self, request_id: str = "") -> None:
        """Notes that the call is for a request to the engine, and the caller's name for it."""
        self.record.run(self.context.invocation_metadata(), self.deadline)
        self.record.request_id = request_id if is_id(request_id) else ""

    async def note(self, request_id: str) -> None:
        """Notes that the engine has accepted the request."""
        self.record.admit(request_id)

    async def admit(self, request_id: str) -> None:
        """Sends the caller the id of its request, which the engine has accepted."""
        self.record.admit(request_id)
        await self.context.send_initial_metadata(((METADATA_KEY, request_id),))


@dataclass(frozen=True)
class GrpcService:
    """A service.

    Attributes:
        description: its description.
        servicer: has a method per call of the service, for one message, or for an iterator over those of a stream, and
            its GrpcCall.
        role: the role that its callers need.
    """

    description: ServiceDescriptor
    servicer: Any
    role: str = GENERATE

    @property
    def name(self) -> str:
        """The full name."""
        name: str = self.description.full_name
        return name


class Calls:
    """Lets callers make the calls of a service that need its role.

    Args:
        callers: identifies the callers.
        log: the log of calls.
        role: the role that a caller needs.
    """

    def __init__(self, callers: Callers, log: RequestLog, role: str) -> None:
        self._callers, self._log, self._role = callers, log, role

    def add_service(self, server: grpc.aio.Server, service: GrpcService) -> None:
        """Adds a service to a server; its calls get messages that `read_message` has checked."""
        handlers = {
            method.name: make_handler(method, self._served(method, getattr(service.servicer, method.name)))
            for method in service.description.methods
        }
        add_methods(server, service.name, handlers)

    def _served(self, method: MethodDescriptor, answer: Callable[[Any, GrpcCall], Awaitable[Any]]) -> ServeCall:
        kind = GetMessageClass(method.input_type)

        async def serve_one(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with answered(context), self._begun(method.name, context) as call, ended_by(call.deadline):
                return await answer(await _read(kind, await only_message(context)), call)

        async def serve_stream(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with answered(context), self._begun(method.name, context) as call:
                return await answer((await _read(kind, raw) async for raw in raws), call)

        return serve_stream if method.client_streaming else serve_one

    @asynccontextmanager
    async def _begun(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[GrpcCall]:
        """Identifies the caller before a message is read; errors of the body become lines of the log."""
        deadline = deadline_of(context.time_remaining())
        with self._log.call(method, client_of(context)) as record:
            caller = self._callers.identify(context.invocation_metadata())
            record.principal = caller.principal
            caller.require(self._role)
            try:
                yield GrpcCall(context, caller, record, deadline)
            except grpc.aio.BaseError as error:  # the server or the client has ended the call already
                raise asyncio.CancelledError("the call has ended") from error


async def _read(kind: type[Message], raw: bytes) -> Message:
    inline = len(raw) <= INLINE_BYTES
    return read_message(kind, raw) if inline else await asyncio.to_thread(read_message, kind, raw)
