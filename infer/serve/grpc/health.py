"""grpc.health.v1 for the server: the service "" is its liveness, "tk.v1.Generation" its readiness for requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2

from ..operations.lifecycle import ServerState
from .messages import make_handler, only_message, read_short_message
from .server import add_methods
from .status import abort, answered

LIVENESS: Final = ""
READINESS: Final = "tk.v1.Generation"
HEALTH_SERVICE: Final = health.SERVICE_NAME
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health status for probes and watchers.

    A server that drains, or whose workers start again, is alive; one that lost them for good is dead. A change waits
    for no watcher: the servicer of grpcio-health-checking holds a lock while it sends, so that a watcher that reads
    nothing would keep all statuses as they are, and it reads messages of any size on the event loop.
    """

    def __init__(self) -> None:
        self._statuses = {LIVENESS: _SERVING, READINESS: _NOT_SERVING}
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server."""
        methods = health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name
        answers = {"Check": self.Check, "Watch": self.Watch}
        handlers = {name: make_handler(methods[name], partial(_serve, answer)) for name, answer in answers.items()}
        add_methods(server, HEALTH_SERVICE, handlers)

    def show(self, state: ServerState) -> None:
        """Reports the state of the server from now on."""
        self._statuses = {
            LIVENESS: _NOT_SERVING if state is ServerState.FAILED else _SERVING,
            READINESS: _SERVING if state is ServerState.SERVING else _NOT_SERVING,
        }
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, service: str) -> Any:
        """Returns the status of a service, one of health_pb2.HealthCheckResponse.ServingStatus."""
        return self._statuses.get(service, _UNKNOWN)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Answers with the status of a service."""
        status = self.status(request.service)
        if status == _UNKNOWN:
            await abort(context, grpc.StatusCode.NOT_FOUND, f'The services here are "{LIVENESS}" and "{READINESS}".')
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Sends the status of a service, and each other one that it comes to have."""
        last = None
        while True:
            status, changed = self.status(request.service), self._changed
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()


async def _serve(
    answer: Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]],
    raws: AsyncIterator[bytes],
    context: grpc.aio.ServicerContext,
) -> Any:
    async with answered(context):
        message = read_short_message(health_pb2.HealthCheckRequest, await only_message(context))
    return await answer(message, context)
