"""The HTTP port of a server, for OpenAI's dialect."""

from typing import Final

from ..access.callers import Callers
from ..call.request_log import RequestLog
from ..call.runner import RequestRunner
from ..http.listener import Listener
from ..http.origins import rules_of
from ..http.router import HttpRouter
from ..metrics.exposition import MetricsCollector
from ..metrics.statistics import RequestStatistics
from ..options import ServerOptions
from .routes import routes_of
from .served import ServedModel

# The names of fields in errors, which the log may have.
_NAMES: Final = frozenset(
    (
        *("include_usage", "json_schema", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_tokens"),
        *("name", "prompt", "response_format", "schema", "stream", "stream_options", "strict", "top_logprobs", "type"),
        *("best_of", "echo", "functions", "suffix", "tool_choice", "tools"),
    )
)


class HttpPort(Listener):
    """The HTTP port of a server.

    Args:
        options: the options of the server.
    """

    names = _NAMES

    def __init__(self, options: ServerOptions) -> None:
        super().__init__("HTTP", options.host, options.http_port or 0, options.max_connections, options.certificates)
        self._origins = rules_of(options)

    async def open(
        self, runner: RequestRunner, callers: Callers, log: RequestLog, statistics: RequestStatistics
    ) -> None:
        """Starts to listen.

        Args:
            runner: runs the requests.
            callers: identifies the callers by their tokens.
            log: the log of calls.
            statistics: counts the requests of all protocols, for the metrics.

        Raises:
            ConfigError: the address is in use or not available.
        """
        routes = routes_of(ServedModel(runner, log), MetricsCollector(runner.engine, statistics))
        await self.listen(HttpRouter(routes, callers, self._origins, log), log)
