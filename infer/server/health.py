"""grpc.health.v1 for the server: "" says that it lives, "tk.v1.Generation" that it takes requests."""

from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

LIVENESS: Final = ""
READINESS: Final = "tk.v1.Generation"
HEALTH_SERVICE: Final = health.SERVICE_NAME
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """What probes and watchers are told. A server that drains lives on; one that lost a worker is dead."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answer probes on this server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self) -> None:
        """Requests are taken."""
        await self._servicer.set(READINESS, _SERVING)

    async def set_draining(self) -> None:
        """No new requests are taken."""
        await self._servicer.set(READINESS, _NOT_SERVING)

    async def set_dead(self) -> None:
        """Nothing will be answered any more: restart this process."""
        await self._servicer.set(READINESS, _NOT_SERVING)
        await self._servicer.set(LIVENESS, _NOT_SERVING)
