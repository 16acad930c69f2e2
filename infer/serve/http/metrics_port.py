"""The port of metrics, for Prometheus: HTTP with all limits of the HTTP port, without tokens and encryption."""

import asyncio
from dataclasses import replace
from typing import Final

from ..access.tokens import Callers
from ..call.call import Frontend, ServerCall
from ..metrics.exposition import MetricsCollector
from ..options import ServerOptions
from .connection import HttpConnection
from .framing import HttpRequest
from .listener import Listener
from .origins import Origins
from .router import HttpRoute, HttpRouter

PATH: Final = "/metrics"
MAX_CONNECTIONS: Final = 64


def metrics_port_of(options: ServerOptions) -> Listener:
    """Returns the port of metrics of a server."""

    def router_of(frontend: Frontend) -> HttpRouter:
        route = metrics_route(MetricsCollector(frontend.runner.engine, frontend.statistics), None)
        return HttpRouter({PATH: route}, replace(frontend, callers=Callers()), Origins())

    most = min(MAX_CONNECTIONS, options.max_connections)
    return Listener("metrics", options.metrics_host, options.metrics_port or 0, most, router_of)


def metrics_route(metrics: MetricsCollector, role: str | None) -> HttpRoute:
    """Returns the route of metrics for callers of a role; None = for all."""

    async def answer(request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        body, media_type = await asyncio.to_thread(metrics.exposed, request.header("accept"))
        await reply.whole(200, media_type, body)

    return HttpRoute(answer, role=role)
