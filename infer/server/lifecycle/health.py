"""grpc.health.v1 for the server: the service "" is its liveness, "tk.v1.Generation" its readiness for requests."""

from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

LIVENESS: Final = ""
READINESS: Final = "tk.v1.Generation"
HEALTH_SERVICE: Final = health.SERVICE_NAME
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health status for probes and watchers.

    A server that drains, or whose workers start again, is alive; one that lost them for good is dead.
    """

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self) -> None:
        """Reports that the server accepts requests."""
        await self._servicer.set(READINESS, _SERVING)

    async def set_unready(self) -> None:
        """Reports that the server accepts no new requests now."""
        await self._servicer.set(READINESS, _NOT_SERVING)

    async def set_dead(self) -> None:
        """Reports that the server is dead and must be restarted."""
        await self._servicer.set(READINESS, _NOT_SERVING)
        await self._servicer.set(LIVENESS, _NOT_SERVING)
