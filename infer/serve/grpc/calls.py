"""Calls over gRPC: each is a `ServerCall`, whose messages are checked, and ends with a status; all need a token."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from ....core.errors import TkError
from ...engine.request.request import Request
from ...engine.request.streams import EventStream
from ..access.tokens import GENERATE
from ..call.call import Frontend, RequestRunner, ServerCall, deadline_of, ended_by
from ..call.request_ids import METADATA_KEY
from ..metrics.request_record import RequestRecord
from .messages import INLINE_BYTES, ServeCall, make_handler, only_message, read_message
from .server import add_methods
from .status import answered, client_of


class GrpcCall(ServerCall):
    """A call over gRPC.

    Attributes:
        context: gRPC's side of the call.
    """

    def __init__(self, frontend: Frontend, record: RequestRecord, context: grpc.aio.ServicerContext) -> None:
        super().__init__(frontend, record, context.invocation_metadata(), deadline_of(context.time_remaining()))
        self.context = context

    @asynccontextmanager
    async def run(self, *requests: Request) -> AsyncIterator[list[EventStream]]:
        """See `ServerCall.run`; the caller gets the id of its request when the engine has accepted it."""
        async with super().run(*requests) as streams:
            await self.context.send_initial_metadata(((METADATA_KEY, self.record.request_id),))
            yield streams


@dataclass(frozen=True)
class GrpcService:
    """A service.

    Attributes:
        make: makes its servicer, which has a method per call of the service, for one message, or for an iterator over
            those of a stream, and its GrpcCall.
        role: the role that its callers need.
    """

    description: ServiceDescriptor
    make: Callable[[RequestRunner], Any]
    role: str = GENERATE

    def add_to(self, server: grpc.aio.Server, frontend: Frontend) -> None:
        """Adds the service to a server; its calls get messages that `read_message` has checked."""
        servicer = self.make(frontend.runner)
        handlers = {
            method.name: make_handler(method, self._served(method, getattr(servicer, method.name), frontend))
            for method in self.description.methods
        }
        add_methods(server, self.description.full_name, handlers)

    def _served(
        self, method: MethodDescriptor, answer: Callable[[Any, GrpcCall], Awaitable[Any]], frontend: Frontend
    ) -> ServeCall:
        kind = GetMessageClass(method.input_type)

        @asynccontextmanager
        async def begun(context: grpc.aio.ServicerContext) -> AsyncIterator[GrpcCall]:
            """Identifies the caller before a message is read; errors of the body become lines of the log."""
            async with answered(context):
                with frontend.log.call(method.name, client_of(context)) as record:
                    call = GrpcCall(frontend, record, context)
                    call.identify()
                    call.caller.require(self.role)
                    try:
                        yield call
                    except grpc.aio.BaseError as error:  # the server or the client has ended the call already
                        raise asyncio.CancelledError("the call has ended") from error

        async def serve_one(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with begun(context) as call, ended_by(call.deadline):
                return await answer(await _read(kind, await only_message(context)), call)

        async def serve_stream(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with begun(context) as call:
                return await answer((await _read(kind, raw) async for raw in raws), call)

        return serve_stream if method.client_streaming else serve_one


async def _read(kind: type[Message], raw: bytes) -> Message:
    inline = len(raw) <= INLINE_BYTES
    return read_message(kind, raw) if inline else await asyncio.to_thread(read_message, kind, raw)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Refuses calls, before their messages are read, of callers that are unknown.

    Args:
        frontend: identifies the callers, and has the log.
        services: the full names of the services that identify their callers themselves (see `GrpcService`).
    """

    def __init__(self, frontend: Frontend, services: Sequence[str]) -> None:
        self._frontend = frontend
        self._others = tuple(f"/{service}/" for service in (HEALTH_SERVICE, *services))

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a call: its own, or one that refuses it."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._others):  # None: no such method
            try:
                self._frontend.callers.identify(details.invocation_metadata)
            except TkError as error:
                return self._refusal(details.method, error)
        return handler

    def _refusal(self, method: str, error: TkError) -> Any:
        """Returns a handler that ends a call of any kind with an error; as one of streams it reads no message first."""

        async def refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
            try:
                async with answered(context):
                    log = self._frontend.log
                    with log.call(log.known(method.rpartition("/")[2]), client_of(context)):
                        raise error
            finally:
                error.__traceback__ = None  # it has this frame, which has the error: only a search would find them

        return grpc.stream_stream_rpc_method_handler(refuse)
