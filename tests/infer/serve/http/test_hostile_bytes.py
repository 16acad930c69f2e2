"""Bytes that are no HTTP, and connections that never get on: each is answered or closed, and nothing is left behind."""

import asyncio
import logging
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, delta, started
from tk.tests.infer.serve.http.http_server import HttpServerThread, post, read_to_end

HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY: Final = b'{"prompt":"hi","n":2,"stop":["x"],"logit_bias":{"5":1.5}}'
SEEDS: Final = (
    HEALTH,
    HEALTH * 3,
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    post("/v1/completions", BODY),
    post("/v1/completions", BODY[:-1] + b',"stream":true}', "x-request-timeout: 5", "authorization: Bearer x"),
    post("/v1/chat/completions", b'{"messages":[{"role":"user","content":"hi"}]}') + HEALTH,
    post("/v1/completions", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    + b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\n\r\n",
    post("/v1/completions", BODY, "expect: 100-continue", "connection: keep-alive, upgrade", "upgrade: h2c"),
)  # fmt: skip
NASTY: Final = (
    *(b"\x00", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b":", b" ", b"\t", b"\xff\xfe", b"\x80", b"%00", b"{" * 100, b'"'),
    *(b"99999999999999999999", b"-1", b"0x10", b"1e9", b"\xef\xbc\x91", b"HTTP/1.1", b"HTTP/0.9", b"chunked"),
    *(b"content-length: 7\r\n", b"transfer-encoding: chunked\r\n", b"host: x\r\n", b"A" * 40_000, b"a: b\r\n" * 9000),
)
STATUSES: Final = re.compile(rb"HTTP/1\.1 (100|200|4\d\d|501|505) ")
RESET: Final = struct.pack("ii", 1, 0)
NUM_SLOW: Final = 60


def mutated(draw: random.Random) -> bytes:
    """A request with a few faults, or nothing but noise."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.choice((1, 20, 500, 5000)))
    data = bytearray(draw.choice(SEEDS))
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((0, 1, 1, 4, 30)))
        match draw.randrange(5):
            case 0:
                data[start:stop] = draw.choice(NASTY)
            case 1:
                data[start:stop] = draw.randbytes(stop - start)
            case 2:
                data[start:start] = data[start:stop]
            case 3:
                del data[start:stop]
            case 4:
                data += draw.choice(SEEDS)[start:]
    return bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data) + 1)))])


def exchange(port: int, data: bytes, draw: random.Random) -> bytes:
    """What a port says to some bytes, in pieces or at once; the client ends in one of three ways."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as connection:
        try:
            for piece in (data,) if draw.random() < 0.7 else (data[: len(data) // 2], data[len(data) // 2 :]):
                connection.sendall(piece)
            match draw.randrange(4):
                case 0:  # it is gone without a word
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return b""
                case 1:
                    return b""
            connection.shutdown(socket.SHUT_WR)
            return read_to_end(connection)
        except ConnectionError:
            return b""


def left_behind(server: HttpServerThread) -> tuple[int, int]:
    """The tasks of the server's loop, and the open files of this process."""

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    return server.run(tasks()), len(os.listdir("/proc/self/fd"))


def wait_until_left(server: HttpServerThread, before: tuple[int, int]) -> None:
    deadline = time.monotonic() + 20
    while True:
        tasks, files = left_behind(server)
        if tasks <= before[0] and files <= before[1] + 4:  # the process of chat templates has a few, once
            return
        assert time.monotonic() < deadline, f"{tasks} tasks and {files} open files are left, {before} were before"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("HTTP", 300),
        ("metrics", 100),
        pytest.param("HTTP", 10_000, marks=pytest.mark.matrix),
        pytest.param("metrics", 10_000, marks=pytest.mark.matrix),
    ],
)
def test_mutated_requests_are_answered_or_closed_and_leave_nothing(
    server: HttpServerThread,
    engine: FakeEngine,
    before: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
    name: str,
    count: int,
) -> None:
    port = server.http_port if name == "HTTP" else server.metrics_port
    draw, resident, answered = random.Random(count), 0, 0
    for number in range(count):
        if number == count // 2:
            resident = resident_bytes()
        data = mutated(draw)
        answer = exchange(port, data, draw)
        assert answer == b"" or STATUSES.match(answer), (data, answer)
        answered += answer != b""
        engine.requests.clear()
        engine.aborted.clear()
    assert answered > count / 4
    wait_until_left(server, before)
    engine.wait_for(lambda e: e.num_live == 0)
    assert server.ask("/v1/completions", {"prompt": "hi"}).status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert resident_bytes() - resident < 8 << 20


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still, so that no time passes on a slow machine, until the test lets it run."""

    _now, _begun, _speed = 0.0, 0.0, 0.0

    def time(self) -> float:
        return self._now + self._speed * (time.monotonic() - self._begun)

    def run_clock(self, speed: float) -> None:
        """Lets the clock run so many times as fast as others; 0 = it stands still."""

        def change() -> None:
            self._now, self._begun, self._speed = self.time(), time.monotonic(), speed

        self.call_soon_threadsafe(change)


@pytest.fixture
def loop() -> StillLoop:
    return StillLoop()


@pytest.fixture
def still(engine: FakeEngine, loop: StillLoop) -> Iterator[HttpServerThread]:
    """A server on a loop whose clock stands still."""
    server = HttpServerThread(engine, http_port=0, loop=loop)
    yield server
    server.close()


@pytest.fixture
def before_still(still: HttpServerThread) -> tuple[int, int]:
    """What that server has before its first connection."""
    return left_behind(still)


@pytest.fixture
def before(server: HttpServerThread) -> tuple[int, int]:
    """What the server has before its first connection."""
    return left_behind(server)


@pytest.fixture
def trickling(still: HttpServerThread, before_still: tuple[int, int]) -> Iterator[list[socket.socket]]:
    """Connections of which each sends a byte at a time, of headers or of a body, and never comes to an end."""
    head = post("/v1/completions", b"x" * 10_000)[:-10_000]
    begun = [b"", b"G", HEALTH[:-2] + b"x: ", head, head + b"{"]
    connections = [still.connect(begun[number % len(begun)]) for number in range(NUM_SLOW)]
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.05):
            for connection in connections:
                with suppress(OSError):  # the server has closed it
                    connection.send(b"a")

    thread = threading.Thread(target=trickle)
    thread.start()
    yield connections
    over.set()
    thread.join()
    for connection in connections:
        connection.close()


def test_slow_connections_fill_the_server_for_a_moment_only(
    still: HttpServerThread,
    loop: StillLoop,
    trickling: list[socket.socket],
    before_still: tuple[int, int],
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(still.http, "most_connections", NUM_SLOW)
    with still.connect() as one_more:
        assert read_to_end(one_more).startswith(b"HTTP/1.1 503")
    loop.run_clock(50.0)
    for connection in trickling:
        try:
            answer = read_to_end(connection)
        except ConnectionError:  # it sent a byte after the answer
            answer = b""
        finally:
            connection.close()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    wait_until_left(still, before_still)
    loop.run_clock(0.0)
    assert still.ask("/v1/completions", {"prompt": "hi"}).status == 200
    assert len(engine.requests) == 1


def test_slow_connections_hold_up_no_other(still: HttpServerThread, trickling: list[socket.socket]) -> None:
    for _ in range(20):
        assert still.ask("/v1/completions", {"prompt": "hi"}).status == 200
    for connection in trickling:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is open and has no answer: none of its times has passed
            connection.recv(1)


def test_clients_that_read_nothing_hold_up_no_other(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), *[delta("x" * 30_000)] * 100]
    held = [server.connect(post("/v1/completions", b'{"prompt":"hi","stream":true}')) for _ in range(10)]
    engine.wait_for(lambda e: e.num_live == 10)
    for _ in range(10):  # the server waits longer for the others than this client does
        assert server.ask("/health").status == 200
    for connection in held:
        connection.close()
    engine.wait_for(lambda e: e.num_live == 0)
    assert len(engine.aborted) == 10
