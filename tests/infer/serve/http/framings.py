"""Random framings of HTTP/1.1 requests, valid and not, with a request hidden in each, and a strict judge of them.

The judge is no code of the server: it takes what RFC 9112 leaves no doubt of, and ends at the first byte of doubt.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE: Final = re.compile(rb"(" + _TOKEN + rb") (?:https?://[^/\s]*)?(/[!\x22$-~]*) HTTP/1\.([01])", re.IGNORECASE)
_FIELD: Final = re.compile(
    rb"(" + _TOKEN + rb"):[ \t]*((?:[!-~\x80-\xff](?:[ \t!-~\x80-\xff]*[!-~\x80-\xff])?)?)[ \t]*"
)
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_END: Final = b"\r\n\r\n"

PATH: Final = b"/v1/completions"
BODY: Final = b'{"prompt":"a","max_tokens":1}'
ODDITIES: Final = ("name", "value", "twice", "both", "line", "chunks", "last", "target")

LENGTH_NAMES: Final = (b"Content-Length", b"content-length", b"Content-Length ", b"Content_Length", b" Content-Length")
CODING_NAMES: Final = (
    *(b"Transfer-Encoding", b"transfer-encoding", b"Transfer-Encoding ", b"Transfer-Encoding\t"),
    *(b"Transfer_Encoding", b" Transfer-Encoding", b"\x0bTransfer-Encoding"),
)
CODINGS: Final = (
    *(b"chunked", b"Chunked", b"  chunked ", b"chunked, identity", b"identity, chunked", b"gzip, chunked", b"xchunked"),
    *(
        b"chunked, chunked",
        b"\x0bchunked",
        b'"chunked"',
        b"chunked;q=1",
        b"identity",
        b"",
        b"chunked\t",
        b"\xffchunked",
    ),
)
LINE_ENDS: Final = (b"\n", b"\r", b"\r\r\n", b"\n\r\n", b"\r\n ", b"\r\n\t", b" \r\n", b"\0\r\n")
SIZES: Final = (b"%x", b"%X", b"0%x", b"0x%x", b"+%x", b" %x", b"%x ", b"%x;a=b", b'%x;a="\n"', b"-%x", b"%x\t", b"%x,")
LASTS: Final = (
    *(b"0\r\n\r\n", b"000\r\n\r\n", b"0\r\nX-Sum: 1\r\n\r\n", b"0\n\n", b"0\r\n\n", b"0;a=b\r\n\r\n", b"0\r\n", b""),
    *(b"0\r\nContent-Length: 40\r\n\r\n", b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\nX : y\r\n\r\n"),
    *(b"0\r\nX: y\r\n z\r\n\r\n", b"0\r\nHost: other\r\n\r\n", b"0 \r\n\r\n", b"0x0\r\n\r\n", b"-0\r\n\r\n"),
)


@dataclass(frozen=True)
class Judged:
    """A request that a stream of bytes has beyond doubt: its method and path, and its name."""

    call: str
    name: str


def judged(data: bytes) -> list[Judged]:
    """Returns the requests that some bytes have beyond doubt."""
    found: list[Judged] = []
    while (end := data.find(_END)) >= 0:
        first, *lines = data[:end].split(b"\r\n")
        line, fields = _LINE.fullmatch(first), [_FIELD.fullmatch(each) for each in lines]
        if line is None or None in fields:
            break
        values = [(field[1].lower(), field[2]) for field in fields if field is not None]
        rest = _after_body(data[end + len(_END) :], values, is_old=line[3] == b"0")
        if rest is None or sum(name == b"host" for name, _ in values) != 1:
            break
        data = rest
        names = [value.decode("latin-1") for name, value in values if name == b"x-request-id"]
        call = f"{line[1].decode()} {line[2].decode().partition('?')[0]}"
        found.append(Judged(call, names[0] if len(names) == 1 else ""))
        if line[3] == b"0" or any(name == b"connection" for name, _ in values):
            break
    return found


def _after_body(data: bytes, values: Sequence[tuple[bytes, bytes]], is_old: bool) -> bytes | None:
    """Returns what follows a request's body; None where that is in doubt, or the body is not whole."""
    lengths = [value for name, value in values if name == b"content-length"]
    codings = [value.lower() for name, value in values if name == b"transfer-encoding"]
    if codings:
        return None if lengths or is_old or codings != [b"chunked"] else _after_chunks(data)
    if not lengths:
        return data
    if len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,9}", lengths[0]) or int(lengths[0]) > len(data):
        return None
    return data[int(lengths[0]) :]


def _after_chunks(data: bytes) -> bytes | None:
    while (chunk := _CHUNK.match(data)) is not None:
        size, data = int(chunk[1], 16), data[chunk.end() :]
        if not size:
            trailers, blank, rest = (b"\r\n" + data).partition(_END)
            lines = trailers.split(b"\r\n")[1:]
            return rest if blank and all(map(_FIELD.fullmatch, lines)) else None
        if data[size : size + 2] != b"\r\n":
            return None
        data = data[size + 2 :]
    return None


class Framings:
    """Random streams of one caller, whose requests for completions have names of their own.

    Args:
        seed: the seed.
        token: the caller's token.
        host: the value of the header Host.
    """

    def __init__(self, seed: int, token: str, host: str) -> None:
        self._chance, self._token, self._host = random.Random(seed), token.encode(), host.encode()

    def stream(self, name: str) -> bytes:
        """Returns some bytes: a request with none to three oddities, another in its body or behind it.

        Args:
            name: the name of the request, with which those of the others begin.
        """
        chance, hidden = self._chance, self._hidden(f"{name}-hidden")
        oddities = chance.sample(ODDITIES, chance.randint(0, 3))
        body, headers = self._body(hidden, oddities)
        if "twice" in oddities:
            headers += [chance.choice([*headers, b"Host: other", self._common(name)[1], b"Content-Length: 0"])]
        chance.shuffle(headers)
        lines = [self._first_line("target" in oddities), *self._common(name), *headers]
        ends = [b"\r\n"] * len(lines)
        if "line" in oddities:
            ends[chance.randrange(len(ends))] = chance.choice(LINE_ENDS)
        data = b"".join(line + end for line, end in zip(lines, ends, strict=True)) + b"\r\n" + body
        return data + chance.choice([b"", b"", hidden, self._request(f"{name}-next"), b"\r\n" + hidden])

    def _body(self, hidden: bytes, oddities: Sequence[str]) -> tuple[bytes, list[bytes]]:
        """Returns a body, and the headers that say its length, perhaps wrongly."""
        chance = self._chance
        payload = chance.choice([b"", BODY, BODY, hidden, b"0\r\n\r\n" + hidden])
        chunks = self._chunks(payload, oddities)
        lengths = [b"%d" % len(payload)]
        if "value" in oddities:
            size = len(chance.choice([payload, chunks, payload[: payload.find(b"\r\n") + 1]]))
            forms = (b"%d", b"0%d", b"+%d", b"%d,%d", b"%d, 0", b"0x%x", b"%d ", b"%d_0", b"%d;", b'"%d"', b"-%d")
            form = chance.choice(forms)
            lengths = [form % ((size,) * form.count(b"%"))]
        odd = "name" in oddities
        length = (chance.choice(LENGTH_NAMES) if odd else b"Content-Length") + b": " + lengths[0]
        value = chance.choice(CODINGS) if "value" in oddities else b"chunked"
        coding = (chance.choice(CODING_NAMES) if odd else b"Transfer-Encoding") + b": " + value
        is_chunked = chance.random() < 0.5
        if "both" in oddities:
            return (chunks if is_chunked else payload), [length, coding]
        return (chunks, [coding]) if is_chunked else (payload, [length] if payload or odd else [])

    def _chunks(self, payload: bytes, oddities: Sequence[str]) -> bytes:
        chance = self._chance
        cut = chance.randint(0, len(payload))
        made = b""
        for part in filter(None, (payload[:cut], payload[cut:])):
            form, end = (
                (chance.choice(SIZES), chance.choice((b"\r\n", b"\n", b"\r")))
                if "chunks" in oddities
                else (b"%x", b"\r\n")
            )
            made += form % len(part) + b"\r\n" + part + end
        return made + (chance.choice(LASTS) if "last" in oddities else LASTS[0])

    def _first_line(self, is_odd: bool) -> bytes:
        chance = self._chance
        method = chance.choice((b"POST", b"POST", b"POST", b"GET", b"PUT"))
        if not is_odd:
            return method + b" " + PATH + b" HTTP/1.1"
        forms = (
            *(b"%s http://%s%s HTTP/1.1", b"%s http://other%.0s%s HTTP/1.1", b"%s %.0s%s HTTP/1.0", b"%s %.0s%s"),
            *(b"%s  %.0s%s HTTP/1.1", b"%s %.0s%s HTTP/1.1 ", b"%s\t%.0s%s HTTP/1.1", b"%s %s%s HTTP/1.1"),
            *(b"%s %.0s%s HTTP/2.0", b"%s %.0s%s?a=b HTTP/1.1", b"%s %.0s%s#a HTTP/1.1", b"%s %.0s%s x HTTP/1.1"),
        )
        return chance.choice(forms) % (method, self._host, PATH)

    def _hidden(self, name: str) -> bytes:
        """Returns a request to hide: whole, or one that takes the next bytes of the connection for its header."""
        line = b"POST " + PATH + b" HTTP/1.1\r\n"
        parts = (self._request(name), line + b"Host: " + self._host + b"\r\nX-Rest: ", line + b"X-Rest: ")
        return self._chance.choice(parts)

    def _request(self, name: str) -> bytes:
        lines = [b"POST " + PATH + b" HTTP/1.1", *self._common(name), b"Content-Length: %d" % len(BODY), b"", BODY]
        return b"\r\n".join(lines)

    def _common(self, name: str) -> list[bytes]:
        """Returns the headers that all requests have."""
        return [
            b"Host: " + self._host,
            b"Authorization: Bearer " + self._token,
            b"X-Request-Id: " + name.encode(),
            b"Content-Type: application/json",
        ]
