"""The connections of a listening socket, for an event loop, also while the process has no descriptor left for one.

Then the server of asyncio logs each of a hundred attempts with a traceback, begins as many more after a second, and so
on: 200 clients of a process with 100 descriptors wrote 7 MB of log in ten seconds.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

PAUSE: Final = 0.5  # seconds until the next attempt
_NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG: Final = logging.getLogger(__name__)

OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class Acceptor:
    """Takes connections for the running event loop until it is closed.

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
