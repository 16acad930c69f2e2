"""The framing of requests: refused where two parsers could disagree, and else the same as h11's, in any pieces."""

from collections.abc import Sequence
from typing import Final

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.infer.serve.http.framing import MAX_HEADER_BYTES, RequestFraming
from tk.infer.serve.http.problems import HttpProblem
from tk.tests.example_counts import examples
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread, post, read_to_end

HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED: Final = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SMUGGLED: Final = b"GET /load HTTP/1.1\r\nhost: localhost\r\n\r\n"


def with_headers(*lines: bytes, body: bytes = b"") -> bytes:
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


# Name -> (bytes, status). In each, parsers in use disagree on where the request, or a header, ends.
AMBIGUOUS: Final = {
    "a length beside chunks": (
        with_headers(b"content-length: 5", b"transfer-encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
        400,
    ),
    "chunks beside a length": (
        with_headers(b"transfer-encoding: chunked", b"content-length: 5", body=b"0\r\n\r\n" + SMUGGLED),
        400,
    ),
    "two lengths": (with_headers(b"content-length: 1", b"content-length: 41", body=b"x" + SMUGGLED), 400),
    "one length twice": (with_headers(b"content-length: 1", b"content-length: 1", body=b"x"), 400),
    "a list of lengths": (with_headers(b"content-length: 1, 1", body=b"x"), 400),
    "a signed length": (with_headers(b"content-length: +1", body=b"x"), 400),
    "a length in hexadecimals": (with_headers(b"content-length: 0x1", body=b"x"), 400),
    "a length with an underscore": (with_headers(b"content-length: 1_0", body=b"x" * 10), 400),
    "a length of other digits": (with_headers("content-length: \u0661".encode(), body=b"x"), 400),
    "a length of 20 digits": (with_headers(b"content-length: 18446744073709551617", body=b"x"), 400),
    "no length": (with_headers(b"content-length:", body=b"x"), 400),
    "a space before the colon": (with_headers(b"content-length : 1", body=b"x"), 400),
    "a tab before the colon": (with_headers(b"transfer-encoding\t: chunked", body=b"0\r\n\r\n"), 400),
    "a continued line": (with_headers(b"x: a", b" content-length: 1", body=b"x"), 400),
    "a continued first line": (HEAD.replace(b"\r\nhost", b"\r\n host") + b"\r\n", 400),
    "a bare LF after the first line": (b"GET /health HTTP/1.1\nhost: localhost\r\n\r\n", 400),
    "a bare LF in a header": (with_headers(b"x: a\ncontent-length: 1", body=b"x"), 400),
    "bare LFs alone": (b"GET /health HTTP/1.1\nhost: localhost\n\n", 400),
    "a bare CR in a header": (with_headers(b"x: a\rcontent-length: 1", body=b"x"), 400),
    "NUL in a header": (with_headers(b"x: a\0b"), 400),
    "DEL in a header": (with_headers(b"x: a\x7fb"), 400),
    "no colon": (with_headers(b"content-length"), 400),
    "an empty name": (with_headers(b": x"), 400),
    "two codings": (with_headers(b"transfer-encoding: chunked", b"transfer-encoding: chunked"), 501),
    "a list of codings": (with_headers(b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"), 501),
    "chunked twice in a list": (with_headers(b"transfer-encoding: chunked, chunked", body=b"0\r\n\r\n"), 501),
    "an unknown coding": (with_headers(b"transfer-encoding: xchunked"), 501),
    "a quoted coding": (with_headers(b'transfer-encoding: "chunked"'), 501),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
    "two spaces in the first line": (HEAD.replace(b"POST ", b"POST  ") + b"\r\n", 400),
    "a tab in the first line": (HEAD.replace(b"POST ", b"POST\t") + b"\r\n", 400),
    "a space after the version": (HEAD.replace(b"/1.1\r", b"/1.1 \r") + b"\r\n", 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "a space in the path": (b"GET /health x HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a fragment in the target": (b"GET /health#a HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a fragment in a whole target": (b"GET http://localhost/health#/a HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "an authority as target": (b"GET localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "an empty line before the request": (b"\r\n" + SMUGGLED, 400),
    "a space before the method": (b" " + SMUGGLED, 400),
    "a signed chunk": (CHUNKED + b"+1\r\nx\r\n0\r\n\r\n", 400),
    "a chunk of 0x": (CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n", 400),
    "a chunk of 9 digits": (CHUNKED + b"000000001\r\nx\r\n0\r\n\r\n", 400),
    "a chunk without a size": (CHUNKED + b"\r\nx\r\n0\r\n\r\n", 400),
    "a space after a chunk's size": (CHUNKED + b"1 \r\nx\r\n0\r\n\r\n", 400),
    "a chunk's extension": (CHUNKED + b"1;a=b\r\nx\r\n0\r\n\r\n", 400),
    "a bare LF after a chunk's size": (CHUNKED + b"1\nx\r\n0\r\n\r\n", 400),
    "a bare CR after a chunk's size": (CHUNKED + b"1\rx\r\n0\r\n\r\n", 400),
    "a chunk that is too long": (CHUNKED + b"1\r\nxy\r\n0\r\n\r\n", 400),
    "a bare LF after a chunk": (CHUNKED + b"1\r\nx\n0\r\n\r\n", 400),
    "a bare LF after the last chunk": (CHUNKED + b"0\r\n\n" + SMUGGLED, 400),
    "a trailer with a space before its colon": (CHUNKED + b"0\r\nx : y\r\n\r\n", 400),
    "a continued trailer": (CHUNKED + b"0\r\nx: y\r\n z\r\n\r\n", 400),
}


def cut(data: bytes, sizes: Sequence[int] = ()) -> list[bytes]:
    """Returns the requests in some bytes, which come in pieces of these sizes and then the rest."""
    framing, found, start = RequestFraming(), [b""], 0
    for size in (*sizes, len(data)):
        framing.receive(data[start : start + size])
        start += size
        while framing.is_waiting:
            if part := framing.take():
                found[-1] += part
            elif framing.has_ended:
                framing.begin_next()
                found.append(b"")
            else:
                break
    return [each for each in found if each]


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_parsers_end_at_different_bytes_is_refused(name: str) -> None:
    data, status = AMBIGUOUS[name]
    for sizes in ((), (1,) * len(data)):
        with pytest.raises(HttpProblem) as refused:
            cut(data, sizes)
        assert refused.value.status == status


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_it_ends_the_connection_and_no_byte_after_it_runs(
    server: HttpServerThread, engine: FakeEngine, name: str
) -> None:
    data, status = AMBIGUOUS[name]
    with server.connect(data + SMUGGLED) as connection:
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()
    assert not engine.requests


def test_headers_have_the_stated_size_and_no_byte_more(server: HttpServerThread) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: "
    for size, status in ((MAX_HEADER_BYTES, 200), (MAX_HEADER_BYTES + 1, 431), (60_000, 431)):
        with server.connect(head + b"a" * (size - len(head) - 4) + b"\r\n\r\n") as connection:
            assert read_to_end(connection).startswith(b"HTTP/1.1 %d " % status), size
    with server.connect(CHUNKED + b"0\r\nx: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n") as connection:
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/health", 200),
        ("HTTP://LOCALHOST/health?x=/y", 200),
        ("http://other/health", 400),
        ("http://localhost@other/health", 400),
        ("http://localhost", 200),
        ("*", 404),
    ],
)
def test_a_target_may_name_the_server_of_the_header_host(server: HttpServerThread, target: str, status: int) -> None:
    with server.connect(
        f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    ) as connection:
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\ndate: " in answer.lower()


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("identity", 200), ("gzip, br", 415)])
def test_an_encoded_body_is_refused(server: HttpServerThread, coding: str, status: int) -> None:
    with server.connect(
        post("/v1/completions", b'{"prompt":"hi"}', f"content-encoding: {coding}", "connection: close")
    ) as connection:
        assert read_to_end(connection).startswith(b"HTTP/1.1 %d " % status)


def by_h11(data: bytes) -> list[bytes]:
    """Returns the bodies of the requests as h11 reads them."""
    connection, bodies = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    while isinstance(event := connection.next_event(), h11.Request):
        body = b""
        while isinstance(event := connection.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        bodies.append(body)
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
    return bodies


@st.composite
def a_request(draw: st.DrawFn) -> bytes:
    """Returns a request that every parser reads alike."""
    parts = draw(st.lists(st.binary(min_size=1, max_size=30), max_size=3))
    body = b"".join(parts)
    if not draw(st.booleans()):
        return with_headers(b"Content-Length: %d" % len(body), body=body)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    trailers = draw(st.sampled_from([b"", b"X-Sum: 1\r\n", b"a: b\r\nc:\r\n"]))
    return with_headers(b"Transfer-Encoding:  Chunked", body=chunks + b"0\r\n" + trailers + b"\r\n")


@examples(200)
@given(st.lists(a_request(), min_size=1, max_size=4), st.lists(st.integers(1, 40), max_size=30))
def test_requests_end_where_h11_ends_them_in_any_pieces(requests: list[bytes], sizes: list[int]) -> None:
    assert cut(b"".join(requests), sizes) == requests
    assert len(by_h11(b"".join(requests))) == len(requests)
