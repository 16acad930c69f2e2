"""Mutated messages of every method, and clients that never read: each call has a status, and nothing is left."""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import grpc
import pytest

from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.hostile import (
    GENERATION,
    MESSAGES,
    PREFACE,
    SETTINGS,
    call,
    footprint,
    footprint_at_rest,
    frame,
    mutated,
    wait_until,
)
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

MIB: Final = 1 << 20
AT_ONCE: Final = 8
# Of calls that can be wrong in no other way: INTERNAL and UNKNOWN are faults, DEADLINE_EXCEEDED is a hang.
ENDS: Final = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("CANCELLED", "UNIMPLEMENTED"),
}
# Opens a connection, sends its input, and reads nothing.
DEAF_CLIENT: Final = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(sys.stdin.buffer.read())
print("sent", flush=True)
time.sleep(3600)
"""
NO_WINDOW: Final = b"\0\x04\0\0\0\0"  # the setting by which a server may send no DATA at all


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = Serving(
        str(write_tiny_model(tmp_path_factory.mktemp("hostile") / "model")),
        *("--max-running", "8", "--threads", "1", "--kv-blocks", "200", "--default-max-new-tokens", "4"),
    ).wait_ready()
    yield serving
    serving.close()


@pytest.fixture
def channel(serving: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(serving.target) as channel:
        yield channel


def check_unharmed(channel: grpc.Channel) -> None:
    """A right request is answered, no request is live, and no block is lost."""
    request = pb.GenerateRequest(text="right", stopping=pb.Stopping(max_new_tokens=4, ignore_eos=True))
    assert GenerationStub(channel).GenerateOnce(request, timeout=20).usage.completion_tokens == 4
    admin = AdminStub(channel)
    wait_until(lambda: admin.GetLoad(pb.GetLoadRequest(), timeout=20).running == 0)
    report = admin.CheckCache(pb.CheckCacheRequest(), timeout=20)
    assert (report.leaked, report.used, list(report.problems)) == (0, 0, [])


async def crowd(target: str, messages: Iterable[tuple[str, bytes]]) -> Counter[str]:
    """Sends messages, some at a time; returns how often each status ended a call."""
    ends: Counter[str] = Counter()
    left = iter(messages)
    async with grpc.aio.insecure_channel(target) as channel:

        async def caller() -> None:
            for path, message in left:
                ended = channel.unary_stream(path)(message, timeout=20)
                with suppress(grpc.RpcError):
                    async for _ in ended:
                        pass
                name = (await ended.code()).name
                is_right = (
                    name in ENDS or "Health" in path or ("Adapter" in path and name == "UNAVAILABLE")
                )  # a Reload runs
                assert is_right, (name, await ended.details(), path, message)
                ends[name] += 1

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return ends


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_mutated_messages_get_a_status_and_leave_nothing(serving: Serving, channel: grpc.Channel, count: int) -> None:
    draw = random.Random(count)
    asyncio.run(crowd(serving.target, MESSAGES))  # starts the process of chat templates
    ends = asyncio.run(crowd(serving.target, [mutated(draw) for _ in range(count // 2)]))
    check_unharmed(channel)
    before = footprint(serving)
    ends += asyncio.run(crowd(serving.target, [mutated(draw) for _ in range(count // 2)]))
    check_unharmed(channel)
    assert sum(ends.values()) == count
    assert min(ends["OK"], ends["INVALID_ARGUMENT"]) > count / 10, ends
    wait_until(lambda: footprint(serving).files <= before.files)
    after = footprint(serving)
    assert after.threads <= before.threads + 4
    assert after.resident - before.resident < 8 * MIB


def unread_calls(count: int, new_tokens: int) -> bytes:
    """What a client sends that begins calls and lets the server send it nothing but headers."""
    request = pb.GenerateRequest(
        text="nobody reads this",
        sampling=pb.Sampling(n=4),
        stopping=pb.Stopping(max_new_tokens=new_tokens, ignore_eos=True),
        output=pb.OutputOptions(logprobs=20),
    ).SerializeToString()
    calls = [call(2 * number + 1, f"{GENERATION}Generate", request) for number in range(count)]
    return b"".join((PREFACE, frame(SETTINGS, NO_WINDOW), *calls))


@contextmanager
def deaf_client(serving: Serving, data: bytes) -> Iterator[None]:
    """A process that sends some bytes and reads nothing; at the end it is killed."""
    host, _, port = serving.target.rpartition(":")
    client = subprocess.Popen(
        [sys.executable, "-S", "-c", DEAF_CLIENT, host, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(data)
    client.stdin.close()
    assert client.stdout.readline() == b"sent\n"
    try:
        yield
    finally:
        client.kill()
        client.wait()
        client.stdout.close()


async def eight_streams(target: str) -> float:
    """Returns the seconds in which eight streams of 100 tokens come to an end."""
    request = pb.GenerateRequest(text="read", stopping=pb.Stopping(max_new_tokens=100, ignore_eos=True))

    async def read(stub: GenerationStub) -> int:
        return sum([len(event.delta.token_ids) async for event in stub.Generate(request, timeout=60)])

    async with grpc.aio.insecure_channel(target) as channel:
        begin, stub = time.monotonic(), GenerationStub(channel)
        assert await asyncio.gather(*(read(stub) for _ in range(8))) == [100] * 8
        return time.monotonic() - begin


def test_a_client_that_never_reads_slows_no_other_and_is_forgotten_when_killed(
    serving: Serving, channel: grpc.Channel
) -> None:
    admin = AdminStub(channel)

    def live() -> int:
        load = admin.GetLoad(pb.GetLoadRequest(), timeout=20)
        return int(load.running + load.waiting)

    assert live() == 0
    alone = min(asyncio.run(eight_streams(serving.target)) for _ in range(3))
    before = footprint_at_rest(serving)
    with deaf_client(serving, unread_calls(10, 60)):
        wait_until(lambda: footprint(serving).files > before.files and live() == 0)
        beside = min(asyncio.run(eight_streams(serving.target)) for _ in range(3))
        assert footprint(serving).resident - before.resident < 32 * MIB
    assert beside < 2 * alone + 0.1
    with deaf_client(serving, unread_calls(20, 400)):
        wait_until(lambda: live() > 8)
    wait_until(lambda: live() == 0, 2)
    check_unharmed(channel)
    wait_until(lambda: footprint(serving).files <= before.files)


@pytest.mark.parametrize("method", ["Tokenize", "Generate", "GenerateOnce", "Score"])
def test_a_call_without_a_message_gets_a_status(channel: grpc.Channel, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(f"{GENERATION}{method}")(iter([]), timeout=20))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no message" in caught.value.details()
