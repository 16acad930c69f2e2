"""A port of HTTP: it listens, bounds the number of connections, and ends them when the server drains."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Final

from ..access.tls import Certificates
from ..call.call import Frontend
from ..call.request_ids import METADATA_KEY, made_id
from ..options import address_of, not_ours
from .connection import Answer, HttpConnection, client_of
from .json_body import dumped
from .problems import HttpProblem, NoConnectionLeft, body_of
from .tls_context import tls_context

TLS_SECONDS: Final = 10.0
# Bytes that wait for a slow client before its answer waits too.
WRITE_BYTES: Final = 64 << 10
PAUSE: Final = 0.5  # seconds until the next attempt to take a connection for which the process had no descriptor
_NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG: Final = logging.getLogger(__name__)

OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class Acceptor:
    """Takes connections for the running event loop until it is closed, also while no descriptor is left for one.

    Then the server of asyncio logs each of a hundred attempts with a traceback, begins as many more after a second, and
    so on: 200 clients of a process with 100 descriptors wrote 7 MB of log in ten seconds.

    Args:
        listening: the listening socket, which this object owns.
        on_connection: is called with the two ways of each connection, when it is encrypted if it shall be.
        context: the certificates; None = connections are not encrypted.
        handshake_seconds: the time for the handshake of TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        on_connection: OnConnection,
        context: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        self._listening, self._on_connection = listening, on_connection
        self._context, self._seconds = context, handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        self._task = self._loop.create_task(self._run())

    def close(self) -> None:
        """Takes no more connections, and closes the socket; connections live on."""
        self._task.cancel()
        self._loop.call_soon(self._listening.close)  # when the loop no longer waits for it

    async def _run(self) -> None:
        is_short = False
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in _NONE_LEFT and not is_short:
                    _LOG.warning("Connections wait: %s. Allow more open files (ulimit -n).", error.strerror)
                    is_short = True
                await asyncio.sleep(PAUSE if error.errno in _NONE_LEFT else 0)  # others: the client is gone already
                continue
            is_short = False
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
            await asyncio.sleep(0)  # a crowd of connections must not keep all else waiting

    async def _begin(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, self._on_connection, loop=self._loop)
        seconds = None if self._context is None else self._seconds
        with suppress(OSError):  # also a handshake that fails or takes too long
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )


class Listener:
    """A port, for the event loop of its server.

    Args:
        name: the name of the port in the log.
        host: the address to listen on.
        port: the port to listen on; 0 = any free port.
        most_connections: the number of connections that it takes.
        router_of: makes what answers the requests, for the part of a server that the calls of all protocols share.
        certificates: the certificates of TLS; None = connections are not encrypted.
        names: the names of calls and fields in its protocol, which the log may have.

    Attributes:
        address: HOST:PORT, once it listens.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        most_connections: int,
        router_of: Callable[[Frontend], Answer],
        certificates: Certificates | None = None,
        names: Set[str] = frozenset(),
    ) -> None:
        self.name, self.names, self._place = name, names, (host, port)
        self.most_connections, self._router_of, self._certificates = most_connections, router_of, certificates
        self._connections: dict[HttpConnection, asyncio.Task[None]] = {}
        self._acceptor: Acceptor | None = None
        self._is_draining = False
        self.address = ""

    async def open(self, frontend: Frontend) -> None:
        """Starts to listen; raises ConfigError if the address is in use or not available."""
        self._answer, self._log = self._router_of(frontend), frontend.log
        context = None if self._certificates is None else tls_context(self._certificates)
        host, port = self._place
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server(self._place, family=family, backlog=1024)
        except OSError as error:
            raise not_ours(address_of(host, port), error) from error
        self._acceptor = Acceptor(listening, self._accept, context, TLS_SECONDS)
        self.address = address_of(host, listening.getsockname()[1])
        _LOG.info("%s on %s", self.name, self.address)

    def drain(self) -> None:
        """Ends connections without a live request; the others end with their answers. The port answers on."""
        self._is_draining = True
        for connection in list(self._connections):
            connection.close_soon()

    async def stop(self) -> None:
        """Closes the port and ends all connections, when each that still answers has had a moment to end."""
        self.drain()
        if self._acceptor is not None:
            self._acceptor.close()
        if tasks := list(self._connections.values()):
            await asyncio.wait(tasks, timeout=1.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection in a task of its own."""
        if len(self._connections) >= self.most_connections:
            request_id = made_id()
            self._refuse(_NO_ROOM, client_of(writer), request_id)
            writer.write(_FULL % (METADATA_KEY.encode(), request_id.encode(), len(_BODY), _BODY))
            writer.close()
            return
        writer.transport.set_write_buffer_limits(WRITE_BYTES)
        connection = HttpConnection(reader, writer, self._answer, self._refuse, is_last=self._is_draining)
        task = self._connections[connection] = asyncio.create_task(connection.serve())
        task.add_done_callback(lambda _: self._connections.pop(connection))

    def _refuse(self, problem: HttpProblem, client: str, request_id: str) -> None:
        """Logs and counts what could not be read as a request."""
        self._log.refuse("HTTP", problem, client, request_id)


_NO_ROOM: Final = NoConnectionLeft("The server has as many connections as it takes; try again later.", 503)
_BODY: Final = dumped(body_of(_NO_ROOM))
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"%s: %s\r\ncontent-length: %d\r\n\r\n%s"
)
