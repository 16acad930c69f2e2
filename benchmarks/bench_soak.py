"""Pauses between tokens at four times the load that a server takes, beside those of a closed loop that fills it."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import click
import grpc

from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.random_model import VOCAB_SIZE, random_model
from tk.benchmarks.serving.grpc_load import LoadedServer
from tk.benchmarks.serving.in_turn import Promise
from tk.benchmarks.serving.soak_load import DyingClient, Load, Seen, requests
from tk.core.cpu import read_cpu
from tk.infer.client.load_test import percentile
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub

CROWD: Final = 4  # times the load of the closed loop, and the sequences that are live beside its own
RATIO_BOUND: Final = 1.5


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A model; default: a random one of 135 M parameters.")
@click.option("--requests", "count", type=int, default=2000, show_default=True, help="Requests of the open loop.")
@click.option("--closed", type=int, default=200, show_default=True, help="Requests of the closed loop; twice.")
@click.option("--max-running", type=int, default=8, show_default=True)
@click.option("--max-step-ms", type=float, default=50.0, show_default=True, help="The bound that the scheduler keeps.")
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of the workers.")
@click.option("--deaths", type=int, default=8, show_default=True, help="Clients that are killed.")
def main(
    model: Path | None, count: int, closed: int, max_running: int, max_step_ms: float, threads: int, deaths: int
) -> None:
    """Print how calls ended, leaked blocks, and the 99th percentile of pauses beside a closed loop's and the bound."""
    cpu = read_cpu()
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets) or 'no instruction set that kernels are written for'}")
    folder = model or random_model(BUILD / "bench" / "llama-135m")
    queued = (CROWD - 1) * max_running
    options = {
        "--max-running": max_running,
        "--max-queued": queued,
        "--max-step-ms": max_step_ms,
        "--threads": threads,
        "--slow-step-ms": max_step_ms,
    }
    with closing(LoadedServer(folder, *(str(word) for pair in options.items() for word in pair))) as served:
        loops, crowd = asyncio.run(_loads(served.target, count, closed, max_running, deaths))
    for promise in promises(loops, crowd, max_step_ms):
        print(promise.line())


async def _loads(target: str, count: int, closed: int, max_running: int, deaths: int) -> tuple[list[Seen], Seen]:
    """Runs the closed loop before and after the open one; returns both closed ones, and the open one."""
    dying = [DyingClient(target) for _ in range(deaths)]
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            load = Load(channel, requests(max(count, closed), VOCAB_SIZE))
            before = await load.closed(max_running, closed)
            _show("closed loop", before)
            crowd = await load.open(CROWD * before.ends["OK"] / before.seconds, dying)
            _show(f"open loop at {CROWD} x its rate", crowd)
            again = await load.closed(max_running, closed)
            _show("closed loop again", again)
            report = await AdminStub(channel).CheckCache(pb.CheckCacheRequest())
    finally:
        for client in dying:
            client.close()
    print(f"blocks leaked: {report.leaked}, used: {report.used}, problems: {len(report.problems)}")
    return [before, again], crowd


def promises(loops: Sequence[Seen], crowd: Seen, max_step_ms: float) -> list[Promise]:
    """Returns the promises about the pauses of an open loop, beside the shorter ones of the closed loops."""
    *closed, pause = (percentile(each.gaps, 99) or 0.0 for each in (*loops, crowd))
    return [
        Promise("p99 of pauses between tokens beside a closed loop's", pause / min(closed), RATIO_BOUND, most=True),
        Promise("p99 of pauses between tokens beside the scheduler's bound, ms", 1e3 * pause, max_step_ms, most=True),
    ]


def _show(name: str, seen: Seen) -> None:
    ends = ", ".join(f"{number} {status}" for status, number in sorted(seen.ends.items()))
    found = " / ".join(f"{1e3 * (percentile(seen.gaps, percent) or 0.0):.1f}" for percent in (50, 99, 99.9, 100))
    print(f"{name}: {seen.seconds:.0f} s, {ends}; pauses p50 / p99 / p99.9 / most: {found} ms of {len(seen.gaps)}")


if __name__ == "__main__":
    main()
