"""A load client for bench_grpc.py, in a process of its own: FOLDER THREADS. It starts `tk serve` and streams from it.

Messages are kept as bytes and read after a run, so that the client takes as little as it can of the cores that the
server computes on.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import grpc
import numpy as np

from tk.benchmarks.peers.serve_loop import Run, serve
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload, speeds
from tk.proto.v1 import generation_pb2 as pb

METHOD: Final = "/tk.v1.Generation/Generate"
VOCAB: Final = 30000  # prompts are of ids below it
Arrivals = list[list[float]]


class LoadedServer:
    """A `tk serve` process and a connection to it.

    Args:
        folder: the model.
        options: the options of `tk serve`.
        log: the file of its log; None = that of this process.

    Attributes:
        target: HOST:PORT.
        http_address: HOST:PORT of HTTP; "" without the option --http.
    """

    def __init__(self, folder: Path, *options: str, log: IO[str] | None = None) -> None:
        command = [sys.executable, "-m", "tk", "serve", str(folder), "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None  # a pipe
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit(f"`{' '.join(command)}` ended before it was ready.")
        self.target = line.split()[1]
        self.http_address = self._process.stdout.readline().split()[1] if "--http" in options else ""

    @property
    def process_id(self) -> int:
        """The id of the server's process."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the server's process so far, without that of its workers."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in threads) / 1e9

    def close(self) -> None:
        """Ends the process."""
        with self._process:  # its output is closed, and its end waited for
            self._process.terminate()


def request(prompt: Sequence[int], new_tokens: int) -> bytes:
    """Returns the message of a greedy request."""
    message = pb.GenerateRequest()
    message.tokens.ids.extend(prompt)
    message.sampling.temperature = 0.0
    message.stopping.max_new_tokens = new_tokens
    message.stopping.ignore_eos = True
    encoded: bytes = message.SerializeToString()
    return encoded


async def stream(channel: Any, message: bytes) -> list[tuple[float, bytes]]:
    """Streams one answer; returns its messages with the times at which they came."""
    call = channel.unary_stream(METHOD)(message)
    return [(time.perf_counter(), answer) async for answer in call]


def token_times(messages: Sequence[tuple[float, bytes]]) -> list[float]:
    """Returns the time of each token."""
    return [when for when, answer in messages for _ in pb.GenerateResponse.FromString(answer).delta.token_ids]


def load(folder: Path, threads: int) -> Run:
    """Starts the server; returns the function that runs a workload.

    Its speeds have "server", the microseconds of CPU time of the server's process per token, and "first token", the
    milliseconds from the start to the last first token.
    """
    loop = asyncio.new_event_loop()
    served = LoadedServer(folder, "--threads", str(threads), "--max-running", "32")
    channel: Any = None
    random = np.random.default_rng()

    async def connect() -> Any:
        return grpc.aio.insecure_channel(served.target)

    async def answers(messages: Sequence[bytes]) -> list[list[tuple[float, bytes]]]:
        return await asyncio.gather(*(stream(channel, message) for message in messages))

    def run(workload: SpeedWorkload) -> Speeds:
        prompts = random.integers(10, VOCAB, (workload.batch, workload.prompt_tokens)).tolist()
        messages = [request(prompt, workload.new_tokens) for prompt in prompts]
        before, start = served.cpu_seconds(), time.perf_counter()
        found = loop.run_until_complete(answers(messages))
        used = served.cpu_seconds() - before
        arrivals = [token_times(each) for each in found]
        return speeds(workload, start, arrivals) | {
            "server": 1e6 * used / sum(map(len, arrivals)),
            "first token": 1e3 * (max(times[0] for times in arrivals) - start),
        }

    channel = loop.run_until_complete(connect())
    run(SpeedWorkload(8, 8, 8))
    return run


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1]), int(sys.argv[2])))
