"""One HTTP request and the reply to it, as handlers see them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class HttpRequest:
    """A whole request.

    Attributes:
        method: the method, in capitals.
        path: the path, without the query.
        headers: names in small letters, and values, in the order of their arrival.
        body: the body, of a bounded size.
        id: the call's id, the client's or one that was made here: the reply and the log have it.
        client: the address of the client, HOST:PORT.
        call: the name of the call in the log, which has the route in place of the path; "" before that is found.
    """

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes = b""
    id: str = ""
    client: str = ""
    call: str = ""

    def header(self, name: str) -> str:
        """Returns the value of a header that comes once; "" if it is absent or comes again."""
        values = [value for key, value in self.headers if key == name]
        return values[0] if len(values) == 1 else ""


class Reply(Protocol):
    """The way back to the client: `whole`, or `begin`, `send` and `end`.

    Each call waits until the connection takes more bytes, and raises ConnectionError if it is lost.
    """

    @property
    def has_begun(self) -> bool:
        """Whether the status is sent, so that no other one can be."""

    async def whole(self, status: int, content_type: str, body: bytes, headers: Headers = ()) -> None:
        """Sends a reply of a known length."""

    async def begin(self, status: int, content_type: str, headers: Headers = ()) -> None:
        """Sends the head of a reply whose body comes in parts."""

    async def send(self, part: bytes) -> None:
        """Sends a part of the body."""

    async def end(self) -> None:
        """Sends the end of the body."""


async def send_json(reply: Reply, value: Mapping[str, Any], status: int = 200, headers: Headers = ()) -> None:
    """Sends a value as a whole reply."""
    await reply.whole(status, JSON, dumped(value), headers)


def dumped(value: Mapping[str, Any]) -> bytes:
    """Returns a value as JSON without spaces, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


def event_of(value: Mapping[str, Any]) -> bytes:
    """Returns a value as one server-sent event; JSON has no newline outside of escapes."""
    return b"data: " + dumped(value) + b"\n\n"


LAST_EVENT: Final = b"data: [DONE]\n\n"
