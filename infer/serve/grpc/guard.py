"""The guard before calls of no service of ours: reflection, and unknown methods, need a valid token too."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from ....core.errors import TkError
from ..call.call import Frontend
from .status import answered, client_of


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
