"""A request, and the framing of requests: where the head and the body of each end, by the letter of RFC 9112.

A proxy sends requests of many callers on one connection. Where the proxy and the server disagree on the end of a
request, bytes of one caller run as the request of another. Parsers are lenient in different ways, so every byte passes
here before h11 reads it, and a request is refused that two parsers could end at different bytes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .problems import Headers, HttpProblem

MAX_HEADER_BYTES: Final = 32 << 10  # of the request line and all header lines, and of all trailers
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE: Final = re.compile(
    _TOKEN
    + rb" (?:\*|/[!\x22$-~]*|[Hh][Tt][Tt][Pp][Ss]?://[!\x22$-~]+) HTTP/\d\.\d"  # no fragment: no client sends one
)
_FIELD: Final = re.compile(rb"(" + _TOKEN + rb"):([\t\x20-\x7e\x80-\xff]*)")
_BARE: Final = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")  # one half of a line's end
_LENGTH: Final = re.compile(rb"[0-9]{1,19}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_PART_OF_CHUNK: Final = re.compile(rb"[0-9A-Fa-f]{0,8}|[0-9A-Fa-f]{1,8}\r")
_LINE_END: Final = b"\r\n"
_BLANK_LINE: Final = b"\r\n\r\n"


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
    """

    method: str
    path: str
    headers: Headers
    body: bytes = b""
    id: str = ""
    client: str = ""

    def header(self, name: str) -> str:
        """Returns the value of a header that comes once; "" if it is absent or comes again."""
        values = [value for key, value in self.headers if key == name]
        return values[0] if len(values) == 1 else ""


class RequestFraming:
    """The bytes of a connection, cut into requests; plain bytes in and out, without a socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._take: Callable[[RequestFraming], bytes] = RequestFraming._take_head  # of the part that comes next
        self._searched = 0  # bytes of the buffer that hold no end of a head or of trailers
        self._left = 0  # bytes of a body, or of a chunk, to come
        self._is_chunked = False

    @property
    def is_waiting(self) -> bool:
        """Whether bytes wait: of this request, or of the next ones, which came early."""
        return bool(self._buffer)

    @property
    def has_ended(self) -> bool:
        """Whether the current request is whole."""
        return self._take == RequestFraming._take_nothing

    def receive(self, data: bytes) -> None:
        """Adds bytes of the client."""
        self._buffer += data

    def begin_next(self) -> None:
        """Begins the next request, after the end of the one before."""
        self._take = RequestFraming._take_head

    def take(self) -> bytes:
        """Returns the next bytes of the current request, or b"" if they have not come yet or the request has ended.

        Raises:
            HttpProblem: the bytes are no request, or two parsers could understand them differently (400, 431, 501).
        """
        return self._take(self)  # functions, not methods: these would hold this object in a ring

    def _take_head(self) -> bytes:
        if self._buffer and not re.match(_TOKEN, self._buffer):
            raise _refused("it begins with no method")
        head = self._take_lines(_BLANK_LINE)
        if head:
            length = _length_of_body(head)
            self._is_chunked, self._left = length is None, length or 0
            plain = RequestFraming._take_body if length else RequestFraming._take_nothing
            self._take = RequestFraming._take_chunk_head if length is None else plain
        return head

    def _take_body(self) -> bytes:
        """Takes bytes of a body of a stated length, or of one chunk."""
        part = self._cut(min(self._left, len(self._buffer)))
        self._left -= len(part)
        if not self._left:
            self._take = RequestFraming._take_chunk_end if self._is_chunked else RequestFraming._take_nothing
        return part

    def _take_chunk_head(self) -> bytes:
        found = _CHUNK.match(self._buffer)
        if found is None:
            if not _PART_OF_CHUNK.fullmatch(self._buffer):
                raise _refused("a chunk's line is not its size in at most 8 hexadecimal digits, and nothing else")
            return b""
        self._left = int(found[1], 16)
        self._take = RequestFraming._take_body if self._left else RequestFraming._take_trailers
        return self._cut(found.end())

    def _take_chunk_end(self) -> bytes:
        if not _LINE_END.startswith(self._buffer[:2]):
            raise _refused("a chunk is longer than its stated size")
        if len(self._buffer) < len(_LINE_END):
            return b""
        self._take = RequestFraming._take_chunk_head
        return self._cut(len(_LINE_END))

    def _take_trailers(self) -> bytes:
        no_trailer = self._buffer.startswith(_LINE_END)
        trailers = self._cut(len(_LINE_END)) if no_trailer else self._take_lines(_BLANK_LINE)
        if trailers:
            _fields_of(trailers.removesuffix(_LINE_END).splitlines())
            self._take = RequestFraming._take_nothing
        return trailers

    def _take_nothing(self) -> bytes:
        return b""  # the request is whole

    def _take_lines(self, end: bytes) -> bytes:
        """Returns the bytes up to an end, with it, or b"" if it has not come."""
        found = self._buffer.find(end, max(0, self._searched - len(end)))
        stop = len(self._buffer) if found < 0 else found + len(end)
        if stop > MAX_HEADER_BYTES:
            raise HttpProblem(f"The headers have more than {MAX_HEADER_BYTES} bytes.", 431)
        if _BARE.search(self._buffer, max(0, self._searched - 1), stop):
            raise _refused("a line ends with half of CR LF")
        self._searched = len(self._buffer) if found < 0 else 0
        return b"" if found < 0 else self._cut(stop)

    def _cut(self, size: int) -> bytes:
        part = bytes(self._buffer[:size])
        del self._buffer[:size]
        return part


def path_of(target: str, headers: Headers) -> str:
    """Returns the path of a request's target, without its query; clients may name the server in the target, too."""
    if target.startswith(("/", "*")):
        return target.partition("?")[0]
    host, slash, rest = target.partition("://")[2].partition("/")
    if host.lower() not in (value.lower() for name, value in headers if name == "host"):
        raise HttpProblem("The target of the request names another server than the header Host.", 400)
    return (slash + rest).partition("?")[0] or "/"


def _length_of_body(head: bytes) -> int | None:
    """Returns the length of a request's body in bytes; None = it comes in chunks."""
    request_line, *lines = head.removesuffix(_BLANK_LINE).split(_LINE_END)
    if not _REQUEST_LINE.fullmatch(request_line):
        raise _refused("its first line is not METHOD /PATH HTTP/1.1, with one space between the parts")
    fields = _fields_of(lines)
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if codings and (lengths or request_line.endswith(b"1.0")):
        raise _refused("Transfer-Encoding comes with Content-Length, or in HTTP/1.0")
    if codings:
        if codings != [b"chunked"]:
            raise HttpProblem("The only Transfer-Encoding that this port takes is chunked, once.", 501)
        return None
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(value) for value in lengths):
        raise _refused("Content-Length is not one number")
    return int(lengths[0]) if lengths else 0


def _fields_of(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Returns names, in small letters, and values of header lines."""
    found = [_FIELD.fullmatch(line) for line in lines]
    if None in found:
        raise _refused(
            "a header is not NAME: VALUE on one line, without a space before the colon or control characters"
        )
    return [(match[1].lower(), match[2].strip(b" \t")) for match in found if match]


def _refused(reason: str) -> HttpProblem:
    """Returns the problem of bytes that are no request; it holds none of them, which may be of a prompt."""
    return HttpProblem(f"This is not a request of HTTP/1.1: {reason}.", 400)
