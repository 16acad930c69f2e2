"""The HTTP port of a server: it listens, bounds the number of connections, and ends them when the server drains."""

import asyncio
import logging
import socket
from typing import Final

from ..observability.exposition import MetricsCollector
from ..observability.tally import RequestTally
from ..server.access.callers import Callers
from ..server.options import ServerOptions, not_ours
from ..server.request.request_log import RequestLog
from ..server.request.runner import RequestRunner
from .router import HttpRouter
from .routes import routes_of
from .served import ServedModel
from .transport.connection import HttpConnection
from .transport.messages import dumped
from .transport.origins import rules_of
from .transport.problems import HttpProblem, NoConnectionLeft, body_of
from .transport.tls_context import tls_context

MAX_CONNECTIONS: Final = 2048
TLS_SECONDS: Final = 10.0
# Bytes that wait for a slow client before its answer waits too.
WRITE_BYTES: Final = 64 << 10
_LOG: Final = logging.getLogger(__name__)


class HttpPort:
    """The HTTP port of a server, for its event loop.

    Args:
        options: the options of the server.

    Attributes:
        address: HOST:PORT, once it listens.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._connections: dict[HttpConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._origins = rules_of(options)
        self._log = RequestLog()
        self._router = HttpRouter({}, Callers(), self._origins, self._log)
        self._is_draining = False
        self.address = ""

    async def open(self, runner: RequestRunner, callers: Callers, log: RequestLog, tally: RequestTally) -> None:
        """Starts to listen.

        Args:
            runner: runs the requests.
            callers: identifies the callers by their tokens.
            log: the log of calls.
            tally: counts the requests of all protocols, for the metrics.

        Raises:
            ConfigError: the address is in use or not available.
        """
        options, port = self._options, self._options.http_port or 0
        routes = routes_of(ServedModel(runner, log), MetricsCollector(runner.engine, tally))
        self._log, self._router = log, HttpRouter(routes, callers, self._origins, log)
        context = None if options.certificates is None else tls_context(options.certificates)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        try:
            listening = socket.create_server((options.host, port), family=family, backlog=1024)
        except OSError as error:
            raise not_ours(options.address_of(port), error) from error
        handshake = None if context is None else TLS_SECONDS
        self._server = await asyncio.start_server(
            self._accept, sock=listening, ssl=context, ssl_handshake_timeout=handshake
        )
        self.address = options.address_of(listening.getsockname()[1])
        _LOG.info("HTTP on %s", self.address)

    def drain(self) -> None:
        """Ends connections without a live request; the others end with their answers. The port answers on."""
        self._is_draining = True
        for connection in list(self._connections):
            connection.close_soon()

    async def stop(self) -> None:
        """Closes the port and ends all connections, when each that still answers has had a moment to end."""
        self.drain()
        if self._server is not None:
            self._server.close()
        if tasks := list(self._connections.values()):
            await asyncio.wait(tasks, timeout=1.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection in a task of its own."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self._refuse(_NO_ROOM)
            writer.write(_FULL)
            writer.close()
            return
        writer.transport.set_write_buffer_limits(WRITE_BYTES)
        connection = HttpConnection(reader, writer, self._router, self._refuse, is_last=self._is_draining)
        task = self._connections[connection] = asyncio.create_task(connection.serve())
        task.add_done_callback(lambda _: self._connections.pop(connection))

    def _refuse(self, problem: HttpProblem) -> None:
        """Logs and counts what could not be read as a request."""
        self._log.refuse("HTTP", problem)


_NO_ROOM: Final = NoConnectionLeft("The server has as many connections as it takes; try again later.", 503)
_BODY: Final = dumped(body_of(_NO_ROOM))
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
