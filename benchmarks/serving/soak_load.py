"""Callers that read, cancel, run out of time, read slowly or die, and the pauses between tokens that readers see."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import grpc

from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub

FATES: Final = ("read", "read", "cancel", "deadline", "slow")
PATIENCE: Final = 300.0  # seconds for a call that shall end by itself
PROMPT_TOKENS: Final = (16, 256)
NEW_TOKENS: Final = (16, 96)
# A client that connects, streams from when it is asked to, and is killed in the middle.
DYING_CLIENT: Final = """
import sys, time, grpc
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
channel = grpc.insecure_channel(sys.argv[1])
grpc.channel_ready_future(channel).result()
request = pb.GenerateRequest(tokens={"ids": range(10, 50)}, cache={"bypass": True})
request.stopping.max_new_tokens, request.stopping.ignore_eos = 400, True
print("connected", flush=True)
sys.stdin.readline()
while True:
    try:
        for _ in GenerationStub(channel).Generate(request):
            pass
    except grpc.RpcError:
        pass  # the server is full
    time.sleep(0.05)
"""


@dataclass
class Seen:
    """What the callers of a load saw.

    Attributes:
        ends: how often each status ended a call.
        gaps: the seconds between two messages with tokens, of callers that read at once.
        seconds: the duration of the load.
    """

    ends: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def requests(count: int, vocab_size: int, seed: int = 0) -> list[pb.GenerateRequest]:
    """Returns requests with prompts of random tokens, each of its own length, and answers of given lengths."""
    made = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        ids = draw.choices(range(10, vocab_size), k=draw.randint(*PROMPT_TOKENS))
        stopping = pb.Stopping(max_new_tokens=draw.randint(*NEW_TOKENS), ignore_eos=True)
        made.append(pb.GenerateRequest(tokens={"ids": ids}, sampling={"seed": number}, stopping=stopping))
    return made


class Load:
    """Loads of one server.

    Args:
        channel: an open channel to it, of grpc.aio.
        asked: the requests; each load sends the same ones.
        slowness: the longest time for which slow readers put a message off, in seconds.
    """

    def __init__(self, channel: Any, asked: Sequence[pb.GenerateRequest], slowness: float = 0.1) -> None:
        self._stub: Any = GenerationStub(channel)
        self._asked, self._slowness = asked, slowness
        self._num_loads = 0

    async def closed(self, concurrency: int, count: int) -> Seen:
        """Keeps so many streams running, which are read to their ends, for the first `count` requests."""
        seen, messages, start = Seen(), iter(self._fresh()[:count]), time.monotonic()

        async def caller() -> None:
            for message in messages:
                await self._call(message, "read", random.Random(0), seen)

        await asyncio.gather(*(caller() for _ in range(concurrency)))
        seen.seconds = time.monotonic() - start
        return seen

    async def open(self, rate: float, dying: "Sequence[DyingClient]" = ()) -> Seen:
        """Sends all requests at random times, `rate` per second in the mean, with random fates; clients die as well."""
        seen, messages, start = Seen(), self._fresh(), time.monotonic()
        draw, due, calls = random.Random("arrivals"), 0.0, list[asyncio.Task[None]]()
        deaths = {(number + 1) * len(messages) // (len(dying) + 1): client for number, client in enumerate(dying)}
        for number, message in enumerate(messages):
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            due += draw.expovariate(rate)
            fate = random.Random(f"fate {number}")
            calls.append(asyncio.create_task(self._call(message, fate.choice(FATES), fate, seen)))
            if number in deaths:
                calls.append(asyncio.create_task(deaths[number].live_and_die()))
        await asyncio.gather(*calls)
        seen.seconds = time.monotonic() - start
        return seen

    def _fresh(self) -> list[pb.GenerateRequest]:
        """Returns the requests with a salt of their own, so that no load finds the prefixes of one before."""
        self._num_loads += 1
        copies = [pb.GenerateRequest.FromString(each.SerializeToString()) for each in self._asked]
        for each in copies:
            each.cache.salt = str(self._num_loads)
        return copies

    async def _call(self, message: pb.GenerateRequest, fate: str, draw: random.Random, seen: Seen) -> None:
        timeout = draw.uniform(0.02, 2.0) if fate == "deadline" else PATIENCE
        call, times, num_tokens = self._stub.Generate(message, timeout=timeout), list[float](), 0
        # In tokens: a message has many where the server is faster than its reader.
        limit = min(draw.randint(1, 40), message.stopping.max_new_tokens)
        with suppress(grpc.RpcError, asyncio.CancelledError):
            async for event in call:
                if event.WhichOneof("event") != "delta":
                    continue
                times.append(time.monotonic())
                num_tokens += len(event.delta.token_ids)
                if fate == "cancel" and num_tokens >= limit:
                    call.cancel()
                elif fate == "slow":
                    await asyncio.sleep(draw.uniform(0.0, self._slowness))
        code = await call.code()
        seen.ends[code.name] += 1
        if fate != "slow":
            seen.gaps += [after - before for before, after in pairwise(times)]


class DyingClient:
    """A client in a process of its own, which has connected, and whose streams will end by its death.

    It starts before a load: on two cores the start of a process would be the longest pause of all.

    Args:
        target: the server.
        seconds: the time for which it streams.
    """

    def __init__(self, target: str, seconds: float = 1.0) -> None:
        self._seconds = seconds
        command = [sys.executable, "-c", DYING_CLIENT, target]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "connected\n":
            raise SystemExit("A client that shall die later could not connect.")

    async def live_and_die(self) -> None:
        """Lets the process stream, and kills it some time later."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        await asyncio.sleep(self._seconds)
        self.close()

    def close(self) -> None:
        """Kills the process; does nothing if it is dead."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()
