"""The port of metrics, for Prometheus: HTTP with all limits of the HTTP port, without tokens and encryption."""

import asyncio
from typing import Final

from ..observability.exposition import MetricsCollector, exposed
from ..observability.tally import RequestTally
from ..server.access.callers import Callers
from ..server.options import ServerOptions
from ..server.request.request_log import RequestLog
from ..server.runner import RequestRunner
from .router import HttpCall, HttpRoute, HttpRouter
from .transport.listener import Listener
from .transport.messages import HttpRequest, Reply
from .transport.origins import OriginRules

PATH: Final = "/metrics"
MAX_CONNECTIONS: Final = 64


class MetricsPort(Listener):
    """The port of metrics of a server.

    Args:
        options: the options of the server.
    """

    def __init__(self, options: ServerOptions) -> None:
        most = min(MAX_CONNECTIONS, options.max_connections)
        super().__init__("metrics", options.metrics_host, options.metrics_port or 0, most)

    async def open(self, runner: RequestRunner, callers: Callers, log: RequestLog, tally: RequestTally) -> None:
        """Starts to listen; see `Door.open`."""
        route = metrics_route(MetricsCollector(runner.engine, tally), None)
        await self.listen(HttpRouter({PATH: route}, Callers(), OriginRules(), log), log)


def metrics_route(metrics: MetricsCollector, role: str | None) -> HttpRoute:
    """Returns the route of metrics for callers of a role; None = for all."""

    async def answer(request: HttpRequest, call: HttpCall, reply: Reply) -> None:
        body, media_type = await asyncio.to_thread(exposed, metrics, request.header("accept"))
        await reply.whole(200, media_type, body)

    return HttpRoute(answer, role=role)
