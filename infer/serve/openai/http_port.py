"""The HTTP port of a server, for OpenAI's dialect."""

from typing import Final

from ..call.call import Frontend
from ..http.listener import Listener
from ..http.origins import rules_of
from ..http.router import HttpRouter
from ..metrics.exposition import MetricsCollector
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

    async def open(self, frontend: Frontend) -> None:
        """Starts to listen; see `Port`."""
        runner = frontend.runner
        routes = routes_of(ServedModel(runner), MetricsCollector(runner.engine, frontend.statistics))
        await self.listen(HttpRouter(routes, frontend, self._origins), frontend.log)
