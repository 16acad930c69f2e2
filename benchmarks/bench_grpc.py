"""The cost of the server around the engine: `tk serve` and a load client beside the engine alone, on the same cores."""

import asyncio
import resource
import sys
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Final

import click
import grpc

from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.random_model import random_model
from tk.benchmarks.serving.engines import EngineContestant, engine
from tk.benchmarks.serving.grpc_load import LoadedServer, request, stream
from tk.benchmarks.serving.in_turn import Contestant, Promise, medians_in_turn
from tk.benchmarks.serving.peer_process import PeerProcess
from tk.benchmarks.serving.start import descendants, rolled_up
from tk.core.cpu import read_cpu

THROUGHPUT_BOUND: Final = 0.85  # of the engine's own
CPU_BOUND: Final = 100.0  # microseconds of the server's process per token, those of the engine beside it
FIRST_TOKEN_BOUND: Final = 3.0  # milliseconds
IDLE_BOUND: Final = 64.0  # MiB
IDLE_STREAMS: Final = 1000
PAIRS_PER_RUN: Final = 30  # of first tokens
_MIB: Final = 2**20


class TimedEngine:
    """An engine in this process, with the CPU time that it takes here per token, and the time to the first one."""

    def __init__(self, own: EngineContestant) -> None:
        self.name = own.name
        self._own = own

    def run(self, workload: SpeedWorkload) -> Speeds:
        """Runs a workload."""
        before = _cpu_seconds()
        speeds = self._own.run(workload)
        used = _cpu_seconds() - before
        first = 1e3 * workload.batch * workload.prompt_tokens / speeds["prefill"]
        return speeds | {"server": 1e6 * used / (workload.batch * workload.new_tokens), "first token": first}


@click.command()
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of the workers.")
@click.option("--runs", type=int, default=5, show_default=True, help="Runs of each, in turn; medians are printed.")
@click.option("--new-tokens", type=int, default=96, show_default=True)
def main(threads: int, runs: int, new_tokens: int) -> None:
    """Print throughput, CPU time per token, the delay of the first token and the memory of idle streams."""
    cpu = read_cpu()
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets) or 'no instruction set that kernels are written for'}")
    folder = random_model(BUILD / "bench" / "llama-135m")
    promises = beside_engine(folder, threads, runs, new_tokens) + idle_streams(folder)
    for promise in promises:
        print(promise.line())


def beside_engine(folder: Path, threads: int, runs: int, new_tokens: int) -> list[Promise]:
    """Compares the server, with its load client, with the engine alone."""
    command = [sys.executable, "-m", "tk.benchmarks.serving.grpc_load", str(folder.absolute()), str(threads)]
    with (
        closing(PeerProcess("server", command, BUILD / "bench" / "grpc_load.log")) as server,
        engine("engine", folder, threads=threads, max_running=32) as own,
    ):
        contestants: list[Contestant] = [server, TimedEngine(own)]
        wide = medians_in_turn(contestants, SpeedWorkload(32, 64, new_tokens), runs)
        first = first_tokens(server, contestants[1], PAIRS_PER_RUN * runs)
    for name, speeds in wide.items():
        print(f"{name}: {speeds['decode']:.0f} tokens/s, {speeds['server']:.0f} us of CPU time per token")
    print(f"first token {first:.1f} ms later than the engine's, median of {PAIRS_PER_RUN * runs} pairs")
    return [
        Promise("throughput at batch 32 beside the engine's", _ratio(wide, "decode"), THROUGHPUT_BOUND),
        Promise("us of the server's CPU time per token", wide["server"]["server"], CPU_BOUND, most=True),
        Promise("ms until the first token, beyond the engine's", first, FIRST_TOKEN_BOUND, most=True),
    ]


def first_tokens(server: Contestant, own: Contestant, pairs: int) -> float:
    """Returns by how many milliseconds the server's first token is later than the engine's, the median of pairs.

    Each runs once before it is timed: the other one has taken the caches, and idle cores wake slowly, which takes
    several milliseconds of a step and is nothing that the server adds. The machine is slower for seconds at a time,
    so the pairs are subtracted before the median is taken.
    """
    workload, found = SpeedWorkload(1, 16, 1), []
    for _ in range(pairs):
        times = {}
        for one in (server, own):
            one.run(workload)
            times[one] = one.run(workload)["first token"]
        found.append(times[server] - times[own])
    return median(found)


def idle_streams(folder: Path) -> list[Promise]:
    """Measures the memory of streams that wait for their turn behind a long request."""
    options = ("--max-running", "1", "--max-queued", str(2 * IDLE_STREAMS), "--max-model-len", "1024")
    with closing(LoadedServer(folder, *options)) as served:
        growth = asyncio.run(_growth(served))
    print(f"{IDLE_STREAMS} idle streams: {growth / _MIB:.1f} MiB")
    return [Promise(f"MiB of {IDLE_STREAMS} idle streams", growth / _MIB, IDLE_BOUND, most=True)]


async def _growth(served: LoadedServer) -> int:
    """Returns by how many bytes the memory of all processes of a server grows with idle streams."""
    async with grpc.aio.insecure_channel(served.target) as channel:
        await stream(channel, request(range(10, 20), 8))
        long = asyncio.create_task(stream(channel, request(range(10, 20), 1000)))
        await asyncio.sleep(0.5)
        before = _private_bytes(served)
        idle = [asyncio.create_task(stream(channel, request(range(10, 20), 8))) for _ in range(IDLE_STREAMS)]
        await asyncio.sleep(2.0)
        growth = _private_bytes(served) - before
        if long.done():
            raise SystemExit("The long request ended before the memory was measured.")
        for task in (long, *idle):
            task.cancel()
        await asyncio.gather(long, *idle, return_exceptions=True)
    return growth


def _private_bytes(served: LoadedServer) -> int:
    return sum(rolled_up(each, "Private_Dirty") for each in descendants(served.process_id))


def _ratio(found: dict[str, Speeds], kind: str) -> float:
    return found["server"][kind] / found["engine"][kind]


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
