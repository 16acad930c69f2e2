"""Bytes that are no HTTP/2, floods of frames and connections that never get on: other clients are served meanwhile."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.infer.serve.grpc.ports import HANDSHAKE_MS, MAX_CALLS, MAX_PINGS
from tk.infer.serve.options import MAX_CONNECTIONS
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread
from tk.tests.infer.serve.hostile import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GENERATION,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call,
    call_headers,
    connection,
    footprint,
    footprint_at_rest,
    frame,
    header,
    wait_until,
)
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

MIB: Final = 1 << 20
TOKENIZE: Final = pb.TokenizeRequest(text="hi").SerializeToString()
CANCEL: Final = struct.pack(">I", 8)
OPENING: Final = PREFACE + frame(SETTINGS)
TALK: Final = (
    OPENING
    + call(1, f"{GENERATION}Tokenize", TOKENIZE)
    + frame(PING, b"12345678")
    + call(3, f"{GENERATION}Generate", pb.GenerateRequest(text="hi").SerializeToString())
    + frame(WINDOW_UPDATE, struct.pack(">I", 1000))
    + frame(RST_STREAM, CANCEL, 0, 3)
)


def streams(number: int) -> range:
    """The numbers of a hundred streams, others for each number."""
    return range(200 * number + 1, 200 * number + 201, 2)


def resets(path: str) -> Callable[[int], bytes]:
    """Calls that are begun and reset at once."""
    message = pb.GenerateRequest(text="hi").SerializeToString()
    return lambda number: b"".join(
        call(stream, path, message) + frame(RST_STREAM, CANCEL, 0, stream) for stream in streams(number)
    )


# What a client sends again and again.
FLOODS: Final[dict[str, Callable[[int], bytes]]] = {
    "settings": lambda number: frame(SETTINGS) * 500,
    "ping": lambda number: frame(PING, b"12345678") * 500,
    "priority": lambda number: frame(PRIORITY, bytes(5), 0, 1) * 500,
    "unknown frames": lambda number: frame(200, bytes(100)) * 100,
    "windows": lambda number: frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff") * 500,
    "rapid reset": resets(f"{GENERATION}Tokenize"),
    "rapid reset of streams": resets(f"{GENERATION}Generate"),
    "calls without a message": lambda number: b"".join(
        frame(HEADERS, call_headers(), END_HEADERS, stream) for stream in streams(number)
    ),
    "headers without an end": lambda number: (
        frame(CONTINUATION, header(b"a" * 100, b"b" * 100) * 70, 0, 1) if number else frame(HEADERS, b"", 0, 1)
    ),
    "empty continuations": lambda number: frame(CONTINUATION, b"", 0, 1) * 500 if number else frame(HEADERS, b"", 0, 1),
    "empty data": lambda number: (
        frame(DATA, b"", 0, 1) * 500 if number else frame(HEADERS, call_headers(), END_HEADERS, 1)
    ),
}
QUICK: Final = "rapid reset"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = write_tiny_model(tmp_path_factory.mktemp("hostile") / "model")
    serving = Serving(str(model), "--threads", "1", "--kv-blocks", "64", "--default-max-new-tokens", "4").wait_ready()
    yield serving
    serving.close()


@pytest.fixture
def stub(serving: Serving) -> Iterator[GenerationStub]:
    """Another client, on a connection of its own, which it has before the hostile ones."""
    with grpc.insecure_channel(serving.target) as channel:
        stub = GenerationStub(channel)
        ask(stub)
        yield stub
        report = AdminStub(channel).CheckCache(pb.CheckCacheRequest(), timeout=20)
        assert (report.leaked, list(report.problems)) == (0, [])


def ask(stub: GenerationStub) -> float:
    """Makes a call, which must succeed; returns its seconds."""
    begin = time.monotonic()
    assert list(stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20).ids) == [64]
    return time.monotonic() - begin


def drain(connection: socket.socket) -> None:
    """Reads until the connection ends."""
    with suppress(OSError):
        while connection.recv(65536):
            pass


def mutated_talk(draw: random.Random) -> bytes:
    """Noise, or a right beginning with faults in its frames."""
    if draw.random() < 0.2:
        return draw.choice((b"", PREFACE, OPENING)) + draw.randbytes(draw.choice((1, 20, 500, 5000)))
    data = bytearray(TALK)
    for _ in range(draw.randint(1, 5)):
        start = draw.randrange(draw.choice((1, len(OPENING))), len(data))
        stop = min(len(data), start + draw.choice((0, 1, 1, 4, 30)))
        match draw.randrange(5):
            case 0:
                data[start:stop] = draw.randbytes(stop - start)
            case 1:
                data[start:start] = data[start:stop] * draw.choice((1, 1, 50))
            case 2:
                del data[start:stop]
            case 3:
                data[start:stop] = bytes(byte ^ 1 << draw.randrange(8) for byte in data[start:stop])
            case 4:
                stream = draw.choice((0, 1, 2, 3, 1 << 31))
                data += frame(draw.randrange(256), draw.randbytes(draw.randrange(40)), draw.randrange(256), stream)
    return bytes(data)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_random_bytes_and_mutated_frames_leave_nothing(serving: Serving, stub: GenerationStub, count: int) -> None:
    draw = random.Random(count)
    send_mutated(serving, stub, draw, count // 2)
    before = footprint(serving)
    send_mutated(serving, stub, draw, count // 2)
    after = footprint(serving)
    assert after.threads <= before.threads + 4
    assert after.resident - before.resident < 16 * MIB


@pytest.mark.parametrize("count", [60, pytest.param(5_000, marks=pytest.mark.matrix)])
def test_the_port_of_health_takes_the_same(engine: FakeEngine, count: int) -> None:
    server, draw = ServerThread(engine, health_port=0), random.Random(count)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        with suppress(ConnectionError), connection(server.server.grpc.health_address, mutated_talk(draw)) as hostile:
            if draw.random() < 0.5:
                hostile.shutdown(socket.SHUT_WR)
                drain(hostile)
    with grpc.insecure_channel(server.server.grpc.health_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=20).status == health_pb2.HealthCheckResponse.SERVING
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)
    server.close()


def send_mutated(serving: Serving, stub: GenerationStub, draw: random.Random, count: int) -> None:
    """Opens connections one after the other, while another client calls; returns when the server has closed them."""
    before = footprint(serving)
    for number in range(count):
        with suppress(ConnectionError), connection(serving.target, mutated_talk(draw)) as hostile:
            if draw.random() < 0.5:
                hostile.shutdown(socket.SHUT_WR)
                drain(hostile)
        if number % 50 == 0:
            assert ask(stub) < 5
    wait_until(lambda: footprint(serving).files <= before.files + 2)


@contextmanager
def flooding(serving: Serving, make: Callable[[int], bytes]) -> Iterator[None]:
    """A connection that sends frames as fast as they are taken, and reads the answers."""
    over = threading.Event()
    with connection(serving.target, OPENING) as hostile:

        def send() -> None:
            number = 0
            with suppress(OSError):  # the server has closed the connection
                while not over.is_set():
                    hostile.sendall(make(number))
                    number += 1

        threads = [threading.Thread(target=target) for target in (send, lambda: drain(hostile))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            with suppress(OSError):
                hostile.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        (QUICK, 0.4),
        *(pytest.param(name, 8.0, marks=pytest.mark.matrix) for name in FLOODS),
    ],
)
def test_a_flood_of_frames_fails_no_call_of_others(
    serving: Serving, stub: GenerationStub, name: str, seconds: float
) -> None:
    before = footprint(serving)
    end, slowest, most = time.monotonic() + seconds, 0.0, 0
    with flooding(serving, FLOODS[name]):
        while time.monotonic() < end:
            slowest = max(slowest, ask(stub))
            most = max(most, footprint(serving).resident - before.resident)
    assert slowest < 5
    assert most < 128 * MIB
    wait_until(lambda: footprint(serving).files <= before.files)


def test_a_connection_that_only_pings_is_closed(serving: Serving, stub: GenerationStub) -> None:
    with connection(serving.target, OPENING + frame(PING, b"12345678") * (MAX_PINGS + 100)) as hostile:
        received = b""
        with suppress(ConnectionError):
            while part := hostile.recv(65536):
                received += part
    assert b"too_many_pings" in received
    assert ask(stub) < 5


def test_a_path_that_is_no_text_stops_no_server(serving: Serving, stub: GenerationStub) -> None:
    for path in (b"/\xff\xfe/x", b"\x80", b"/tk.v1.Generation/Tokeniz\xe9"):
        headers = call_headers("/PATH").replace(header(b":path", b"/PATH"), header(b":path", path))
        with connection(serving.target, OPENING + frame(HEADERS, headers, END_HEADERS | END_STREAM, 1)) as hostile:
            received = b""
            while b"grpc-status" not in received:
                received += hostile.recv(65536)
        assert b"grpc-status\x0212" in received, "UNIMPLEMENTED"
        assert ask(stub) < 5


def trickle_begins() -> list[bytes]:
    """How connections begin that then go on byte by byte: the preface, headers or a message in part."""
    begun = OPENING + frame(HEADERS, call_headers(), END_HEADERS, 1)
    return [b"", PREFACE[:10], OPENING, OPENING + frame(HEADERS, call_headers())[:20], begun, begun + b"\0\1\0\0\0"]


@contextmanager
def trickling(serving: Serving, begins: list[bytes], count: int, pause: float = 0.3) -> Iterator[list[socket.socket]]:
    """Connections of which each sends a byte every `pause` seconds, and never comes to an end."""
    over = threading.Event()
    with ExitStack() as stack:
        slow = [
            stack.enter_context(connection(serving.target, begins[number % len(begins)])) for number in range(count)
        ]

        def trickle() -> None:
            sent = 0
            while not over.wait(pause):
                for each in slow:
                    with suppress(OSError):  # the server has closed it
                        each.send(PREFACE[sent % len(PREFACE) :][:1])
                sent += 1

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            yield slow
        finally:
            over.set()
            thread.join()


def test_slow_connections_hold_up_no_other(serving: Serving, stub: GenerationStub) -> None:
    before = footprint(serving)
    with trickling(serving, trickle_begins(), 300):
        assert max(ask(stub) for _ in range(50)) < 5
        with grpc.insecure_channel(serving.target) as channel:
            assert ask(GenerationStub(channel)) < 5
        assert footprint(serving).resident - before.resident < 32 * MIB
    wait_until(lambda: footprint(serving).files <= before.files)


@pytest.mark.matrix
def test_connections_without_a_whole_preface_are_closed_in_time(serving: Serving, stub: GenerationStub) -> None:
    before, limit = footprint_at_rest(serving), HANDSHAKE_MS / 1000
    with trickling(serving, [b""], 100, pause=limit / 10):  # the preface would take more than twice as long
        wait_until(lambda: footprint(serving).files == before.files + 100, limit / 2)
        wait_until(lambda: footprint(serving).files <= before.files, limit + 5)


@pytest.mark.matrix
def test_connections_beyond_the_bound_are_closed_at_once(serving: Serving, stub: GenerationStub) -> None:
    before = footprint(serving)
    with ExitStack() as stack:
        with suppress(ConnectionError):
            for _ in range(MAX_CONNECTIONS + 50):
                stack.enter_context(connection(serving.target, b""))
        assert footprint(serving).files <= before.files + MAX_CONNECTIONS
        assert ask(stub) < 5
    wait_until(lambda: footprint(serving).files <= before.files)
    with grpc.insecure_channel(serving.target) as channel:
        assert ask(GenerationStub(channel)) < 5


def test_a_connection_has_so_many_calls_at_a_time(serving: Serving, stub: GenerationStub) -> None:
    begun = b"".join(frame(HEADERS, call_headers(), END_HEADERS, 2 * number + 1) for number in range(MAX_CALLS + 100))
    before = footprint(serving)
    with connection(serving.target, OPENING + begun) as hostile:
        refused, received = 0, b""
        while refused < 100:
            received += hostile.recv(65536)
            while len(received) >= 9 and len(received) >= (size := 9 + int.from_bytes(received[:3], "big")):
                refused += received[3] == RST_STREAM
                received = received[size:]
        assert ask(stub) < 5
    assert footprint(serving).resident - before.resident < 64 * MIB
    wait_until(lambda: footprint(serving).files <= before.files)
