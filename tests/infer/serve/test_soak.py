"""A real server under callers that cancel, run out of time, read slowly or die: every call ends once, nothing leaks."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

MAX_RUNNING: Final = 8
CROWD: Final = 4 * MAX_RUNNING
FATES: Final = ("read", "read", "cancel", "deadline", "slow")
ENDS: Final = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
# A client that begins streams and is killed in the middle of them.
DYING_CLIENT: Final = """
import sys, grpc
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
channel = grpc.insecure_channel(sys.argv[1])
request = pb.GenerateRequest(text="a client that dies", stopping=pb.Stopping(max_new_tokens=400, ignore_eos=True))
calls = [GenerationStub(channel).Generate(request) for _ in range(6)]
next(calls[0])
print("begun", flush=True)
for call in calls:
    for _ in call:
        pass
"""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(
        str(write_tiny_model(tmp_path / "model")),
        *("--max-running", str(MAX_RUNNING), "--max-queued", "40", "--kv-blocks", "48", "--threads", "1"),
    ).wait_ready()
    yield serving
    serving.close()


def resident_bytes(serving: Serving) -> int:
    """The resident memory of the server and its workers."""
    pids = [serving.process.pid, *serving.worker_ids()]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")


async def one_call(stub: Any, draw: random.Random) -> str:
    """Makes one call with a random fate; returns the name of its only status."""
    fate = draw.choice(FATES)
    request = pb.GenerateRequest(
        text="x" * draw.randint(1, 120),
        sampling=pb.Sampling(n=draw.choice((1, 1, 1, 3)), seed=draw.getrandbits(32)),
        stopping=pb.Stopping(max_new_tokens=draw.randint(1, 80), ignore_eos=True),
    )
    call = stub.Generate(request, timeout=draw.uniform(0.005, 0.2) if fate == "deadline" else 120)
    try:
        events, limit = 0, draw.randint(0, 6)
        async for _ in call:
            events += 1
            if fate == "cancel" and events > limit:
                call.cancel()
            elif fate == "slow":
                await asyncio.sleep(draw.uniform(0, 0.1))
    except (grpc.RpcError, asyncio.CancelledError):
        pass
    code: grpc.StatusCode = await call.code()
    name: str = code.name
    return name


async def crowd(target: str, count: int, seed: int) -> Counter[str]:
    """Makes calls, CROWD at a time; returns how often each status ended one."""
    ends: Counter[str] = Counter()
    numbers = iter(range(count))
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationStub(channel)

        async def caller() -> None:
            for number in numbers:
                ends[await one_call(stub, random.Random(seed * 10_000 + number))] += 1

        await asyncio.gather(*(caller() for _ in range(CROWD)))
    return ends


def kill_a_client(target: str) -> None:
    """Runs a client until its streams have begun, and kills it."""
    client = subprocess.Popen([sys.executable, "-c", DYING_CLIENT, target], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()


def wait_idle(admin: Any) -> None:
    """Returns once no request is live: those of killed clients end when the server notices that they are gone."""
    end = time.monotonic() + 60
    while (load := admin.GetLoad(pb.GetLoadRequest(), timeout=10)).running + load.waiting:
        assert time.monotonic() < end, f"requests are still live: {load}"
        time.sleep(0.05)


@pytest.mark.parametrize("count", [pytest.param(2000, marks=[pytest.mark.matrix, pytest.mark.timeout(900)])])
def test_every_call_ends_once_and_nothing_leaks(serving: Serving, count: int) -> None:
    ends = asyncio.run(crowd(serving.target, count // 4, 0))  # memory that every server takes at first
    half = count // 2 - count // 4
    ends += asyncio.run(crowd(serving.target, half, 1))
    with grpc.insecure_channel(serving.target) as channel:
        admin = AdminStub(channel)
        wait_idle(admin)
        before = resident_bytes(serving)
        for number in range(4):
            ends += asyncio.run(crowd(serving.target, count // 8, 2 + number))
            kill_a_client(serving.target)
        wait_idle(admin)
        grown = resident_bytes(serving) / before - 1
        report = admin.CheckCache(pb.CheckCacheRequest(), timeout=10)
    assert sum(ends.values()) == count // 4 + half + 4 * (count // 8)
    assert set(ends) <= ENDS
    assert min(ends["OK"], ends["CANCELLED"], ends["DEADLINE_EXCEEDED"]) > count // 50, ends
    assert (report.leaked, report.used, list(report.problems)) == (0, 0, [])
    assert grown < 0.05
    code, _, errors = serving.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in errors, errors[max(0, errors.index("Traceback") - 400) :][:4000]
