"""One connection: HTTP/1.1 by h11 over asyncio's streams, with a bound on every size and every time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from typing import Any, Final

import h11

from ..call.request_ids import METADATA_KEY, is_id, made_id
from ..options import address_of
from .framing import MAX_HEADER_BYTES, HttpRequest, RequestFraming, path_of
from .json_body import JSON, dumped
from .problems import Headers, HttpProblem, body_of, headers_of, status_of

MAX_BODY_BYTES: Final = 1 << 20
# Seconds for the headers from their first byte on, for the body, and between two requests.
HEADER_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 60.0
# Seconds in which a client must take a part of the reply, of at most the connection's buffer.
WRITE_SECONDS: Final = 60.0
# Seconds in which a connection without a request yet may send its first one when the server begins to drain.
FIRST_SECONDS: Final = 0.2
# Seconds for a connection to end in good order.
LINGER_SECONDS: Final = 1.0
_READ_BYTES: Final = 64 << 10
_LARGE_BYTES: Final = 8 << 10  # it takes some tenths of a millisecond to make so many
_LOG: Final = logging.getLogger(__name__)

Answer = Callable[[HttpRequest, "HttpConnection"], Awaitable[None]]


class HttpConnection:
    """Reads requests one after the other, and is the way back to the client of the one that is being answered.

    A reply is `whole`, `json` or `problem`, or `begin`, `send` and `end`. Each waits until the connection takes more
    bytes, and raises ConnectionError if it is lost. While a request is answered, the end of the connection cancels its
    answer.

    Args:
        reader: the bytes of the client.
        writer: the way to the client.
        answer: answers a request, and its own errors.
        on_refusal: is called with the problem of what could not be read as a request, the client's address, and the id
            of the reply.
        is_last: whether the connection closes after one request.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
        on_refusal: Callable[[HttpProblem, str, str], None],
        is_last: bool = False,
    ) -> None:
        self._reader, self._writer, self._answer, self._on_refusal = reader, writer, answer, on_refusal
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._framing = RequestFraming()
        self._is_last = is_last
        self._client = client_of(writer)
        self._id = ""  # of the request that is read or answered
        self._idle: asyncio.Task[bool] | None = None
        self._is_new = True
        self._is_head = False  # the request's reply has headers alone
        self.own_headers: Headers = ()  # of the reply, whatever else it says

    async def serve(self) -> None:
        """Answers requests until the connection ends or is closed."""
        try:
            while await self._wait_for_bytes() and await self._serve_one():
                self._http.start_next_cycle()
                self._framing.begin_next()
        except (ConnectionError, TimeoutError, h11.LocalProtocolError) as error:
            _LOG.debug("a connection ended: %s", error)
        finally:
            try:
                with suppress(OSError, TimeoutError):  # such as "not connected", which is no ConnectionError
                    async with asyncio.timeout(LINGER_SECONDS):
                        await self._close()
            finally:
                self._writer.transport.abort()

    async def _close(self) -> None:
        """Closes the connection when the client has the last reply.

        A connection that is closed with unread bytes is reset, and the client may lose the reply; so the rest of a
        request that was refused is read, and dropped.
        """
        if self._writer.can_write_eof():
            self._writer.write_eof()
            while await self._reader.read(_READ_BYTES):
                pass
        self._writer.close()
        await self._writer.wait_closed()

    def close_soon(self) -> None:
        """Closes the connection when the request that it answers, if any, is answered.

        A new connection has a moment for the request for which it was opened: that is on its way, or read in part.
        """
        self._is_last = True
        if self._idle is not None:
            asyncio.get_running_loop().call_later(FIRST_SECONDS if self._is_new else 0, self._idle.cancel)

    @property
    def has_begun(self) -> bool:
        """Whether the status is sent, so that no other one can be."""
        return self._http.our_state not in (h11.SEND_RESPONSE, h11.IDLE)

    async def whole(self, status: int, content_type: str, body: bytes, headers: Headers = ()) -> None:
        """Sends a reply of a known length."""
        all_headers = [("content-length", str(len(body))), *headers]
        data = () if self._is_head else (h11.Data(data=body),)
        await self._send(self._head(status, content_type, all_headers), *data, h11.EndOfMessage())

    async def json(self, value: Mapping[str, Any], status: int = 200, headers: Headers = ()) -> None:
        """Sends a value as a whole reply."""
        await self.whole(status, JSON, dumped(value), headers)

    async def problem(self, error: Exception) -> None:
        """Sends an error: as a whole reply, or as the last event of a stream that has begun."""
        if self.has_begun:
            await self.event(body_of(error))
            await self.end()
        else:
            await self.json(body_of(error), status_of(error), headers_of(error))

    async def begin(self, status: int, content_type: str, headers: Headers = ()) -> None:
        """Sends the head of a reply whose body comes in parts."""
        await self._send(self._head(status, content_type, headers))

    async def event(self, value: Mapping[str, Any]) -> None:
        """Sends a value as one server-sent event; JSON has no newline outside of escapes."""
        await self.send(b"data: " + dumped(value) + b"\n\n")

    async def send(self, part: bytes) -> None:
        """Sends a part of the body."""
        await self._send(h11.Data(data=part))

    async def end(self) -> None:
        """Sends the end of the body."""
        await self._send(h11.EndOfMessage())

    async def _wait_for_bytes(self) -> bool:
        """Waits for the next request; returns False if none comes in time, or `close_soon` is called before it."""
        if self._framing.is_waiting:
            return True
        self._idle = asyncio.create_task(self._receive())
        try:
            await asyncio.wait((self._idle,), timeout=IDLE_SECONDS)
            return self._idle.done() and not self._idle.cancelled() and self._idle.result()
        finally:
            self._idle.cancel()
            self._idle = None

    async def _receive(self) -> bool:
        """Receives bytes of the client; returns False at their end."""
        data = await self._reader.read(_READ_BYTES)
        if data:
            self._framing.receive(data)
        else:
            self._http.receive_data(data)
        return bool(data)

    async def _serve_one(self) -> bool:
        """Reads and answers one request; returns whether another may follow."""
        self._is_new = self._is_head = False
        self.own_headers = ()
        self._id = made_id()
        try:
            request = await self._read_request()
        except (HttpProblem, h11.RemoteProtocolError) as error:
            await self._refuse(error)
            return False
        if request is None:
            return False
        await self._answer_while_connected(request)
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE and not self._is_last

    async def _read_request(self) -> HttpRequest | None:
        """Returns the next request, or None at the end of the connection."""
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                head = await self._next_event()
        except TimeoutError:
            raise HttpProblem(f"The headers took longer than {HEADER_SECONDS:g} s.", 408) from None
        if not isinstance(head, h11.Request):
            return None
        self._is_head = head.method == b"HEAD"
        if head.http_version not in (b"1.0", b"1.1"):
            version = head.http_version.decode("ascii")
            raise HttpProblem(f"This is HTTP/{version}; this port takes HTTP/1.1 only.", 505)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
        given = [value for name, value in headers if name == METADATA_KEY]
        if len(given) == 1 and is_id(given[0]):
            self._id = given[0]
        length = next((value for name, value in headers if name == "content-length"), "0")
        if int(length) > MAX_BODY_BYTES:
            raise _too_large()
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read_body()
        except TimeoutError:
            raise HttpProblem(f"The body took longer than {BODY_SECONDS:g} s.", 408) from None
        if body is None:
            return None
        path = path_of(head.target.decode("latin-1"), headers)
        return HttpRequest(head.method.decode("latin-1"), path, headers, body, self._id, self._client)

    async def _read_body(self) -> bytes | None:
        parts, size = [], 0
        while isinstance(event := await self._next_event(), h11.Data):
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(bytes(event.data))
        return b"".join(parts) if isinstance(event, h11.EndOfMessage) else None

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if part := self._framing.take():
                self._http.receive_data(part)
            else:
                await self._receive()
        return event

    async def _answer_while_connected(self, request: HttpRequest) -> None:
        """Answers a request; cancels that when the client is gone, so that the engine ends the request at once."""
        answering = asyncio.ensure_future(self._answered(request))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._is_last = True
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Returns when the client is gone, or sends more of its next requests than fits in between."""
        ahead = 0
        while ahead <= _READ_BYTES and (data := await self._reader.read(_READ_BYTES)):
            ahead += len(data)
            self._framing.receive(data)

    async def _answered(self, request: HttpRequest) -> None:
        try:
            await self._answer(request, self)
        except (ConnectionError, TimeoutError) as error:
            self._is_last = True
            _LOG.debug("a client is gone: %s", error)
        except Exception:
            self._is_last = True
            _LOG.exception("a connection ended by a fault of the server")

    async def _refuse(self, error: HttpProblem | h11.RemoteProtocolError) -> None:
        """Answers what could not be read as a request."""
        if not isinstance(error, HttpProblem):  # the bytes, which h11 adds after a colon, may be of a prompt
            error = HttpProblem(f"This is not HTTP/1.1: {str(error).partition(':')[0]}.", error.error_status_hint)
        self._is_last = True
        self._on_refusal(error, self._client, self._id)
        if not self.has_begun:
            await self.problem(error)

    def _head(self, status: int, content_type: str, headers: Headers) -> h11.Response:
        common = [
            ("date", formatdate(usegmt=True)),
            ("content-type", content_type),
            ("x-content-type-options", "nosniff"),
            (METADATA_KEY, self._id),
        ]
        closing = [("connection", "close")] if self._is_last else []
        return h11.Response(status_code=status, headers=[*common, *self.own_headers, *headers, *closing])

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(self._http.send(event) or b"" for event in events)
        self._writer.write(data)
        async with asyncio.timeout(WRITE_SECONDS):
            await self._writer.drain()
        if len(data) > _LARGE_BYTES:
            await asyncio.sleep(0)  # while the client takes them at once, `drain` lets nothing else run


def client_of(writer: asyncio.StreamWriter) -> str:
    """Returns the address of a connection's other end, HOST:PORT."""
    peer = writer.get_extra_info("peername")
    return address_of(*peer[:2]) if peer else ""


def _too_large() -> HttpProblem:
    return HttpProblem(f"The body has more than {MAX_BODY_BYTES} bytes.", 413)
