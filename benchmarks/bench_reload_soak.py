"""A server under mixed load while it changes its weights again and again: wrong answers, leaks, growth."""

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import click
import grpc

from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.serving.grpc_load import LoadedServer
from tk.benchmarks.serving.in_turn import Promise
from tk.benchmarks.serving.process_figures import HEADING
from tk.benchmarks.serving.reload_load import Expected, ReloadSoak, tokens_text
from tk.benchmarks.serving.reload_steps import save_steps, small_model
from tk.benchmarks.serving.soak_cases import SoakCase, make_cases
from tk.core.cpu import read_cpu

NUM_STEPS: Final = 3
SETTLED: Final = 5  # reloads after which memory shall stay
GROWTH_BOUND: Final = 1.05
WARM_SECONDS: Final = 20.0  # in which the server takes what every server takes
MAX_MODEL_LEN: Final = 1024


@dataclass(frozen=True)
class Times:
    """The options of a soak.

    Attributes:
        seconds: the duration of the load.
        every: the seconds between two reloads.
        concurrency: the number of callers.
        edits: whether files of the served step change meanwhile.
    """

    seconds: float
    every: float
    concurrency: int
    edits: bool = True


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A model with a chat template; default: a small one.")
@click.option("--seconds", type=float, default=600.0, show_default=True, help="Duration of the load.")
@click.option("--reload-every", type=float, default=15.0, show_default=True, help="Seconds between two reloads.")
@click.option("--concurrency", type=int, default=6, show_default=True, help="Callers.")
@click.option("--num-cases", type=int, default=120, show_default=True, help="Different requests.")
@click.option("--edits/--no-edits", default=True, show_default=True, help="Change files of the served step meanwhile.")
@click.option("--threads", type=int, default=1, show_default=True, help="Threads of the workers.")
def main(
    model: Path | None,
    seconds: float,
    reload_every: float,
    concurrency: int,
    num_cases: int,
    edits: bool,
    threads: int,
) -> None:
    """Print what the processes of the server held over time, how calls ended, and the promises."""
    cpu = read_cpu()
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets) or 'no instruction set that kernels are written for'}")
    with tempfile.TemporaryDirectory(prefix="tk-reload-soak-") as folder:
        source = model or small_model(BUILD / "bench" / "llama-with-text")
        options = ("--threads", str(threads), "--max-model-len", str(MAX_MODEL_LEN))
        times = Times(seconds, reload_every, concurrency, edits)
        sys.exit(0 if soak(source, Path(folder), options, num_cases, times) else 1)


def soak(source: Path, work: Path, options: Sequence[str], num_cases: int, times: Times) -> bool:
    """Serves steps made of a model under load, prints the figures, and returns whether all promises are kept.

    Args:
        source: a Hugging Face folder with a tokenizer and a chat template.
        work: an empty folder.
        options: more options of `tk serve`.
        num_cases: the number of different requests.
        times: the options of the load.
    """
    steps = save_steps(source, work / "run", NUM_STEPS)
    cases = make_cases(num_cases, json.loads((source / "config.json").read_text())["vocab_size"])
    (work / "tokens").write_text(tokens_text())
    words = ("--http", "0", "--tokens", str(work / "tokens"), "--max-running", "8", *options)
    with ExitStack() as stack:
        log: IO[str] = stack.enter_context((work / "log").open("w"))
        expected = Expected()
        for number, step in enumerate(steps, 1):
            with closing(LoadedServer(step, *words, log=log)) as fresh:
                asyncio.run(expected.learn(number, fresh, cases))
        served = stack.enter_context(closing(LoadedServer(steps[0], *words, log=log)))
        is_kept = asyncio.run(_soak(served, steps, cases, expected, times))
    tracebacks = (work / "log").read_text().count("Traceback")
    print(f"tracebacks in the log: {tracebacks}")
    return is_kept and not tracebacks


async def _soak(
    served: LoadedServer, steps: Sequence[Path], cases: Sequence[SoakCase], expected: Expected, times: Times
) -> bool:
    """Runs the load, prints its figures, and returns whether all promises are kept."""
    warm = min(WARM_SECONDS, times.seconds / 4)
    async with grpc.aio.insecure_channel(served.target) as channel:
        with closing(ReloadSoak(served, steps, cases, expected, channel)) as soak:
            print(HEADING)
            await soak.run(warm, warm / 2, times.concurrency, times.edits)
            await soak.fill_pools()
            base = await soak.settle()
            print(base.row("base, idle"), flush=True)
            await soak.run(times.seconds, times.every, times.concurrency, times.edits)
            last, report = await soak.settle(), await soak.blocks()
            print(last.row("end, idle"))
    print(
        f"{soak.reloads} reloads, {soak.num_edits} edits; "
        + ", ".join(f"{n} {k}" for k, n in sorted(soak.ends.items()))
    )
    for line in soak.wrong[:20]:
        print(f"wrong: {line}")
    nothing = {
        "wrong answers": len(soak.wrong),
        "blocks that leaked or are in use, and problems of the cache": report.leaked
        + report.used
        + len(report.problems),
        "descriptors beyond those of the base": max(0, last.descriptors - base.descriptors),
        "threads beyond those of the base": max(0, last.threads - base.threads),
        "processes beyond those of the base": max(0, last.processes - base.processes),
    }
    for name, number in nothing.items():
        print(f"{name}: {number}, promised 0: {'kept' if number == 0 else 'MISSED'}")
    promises = growth([sample.rss for sample in soak.samples[SETTLED:]])
    for promise in promises:
        print(promise.line())
    return not any(nothing.values()) and all(promise.is_kept for promise in promises)


def growth(sizes: Sequence[int]) -> list[Promise]:
    """Returns the promises about the bytes of the server's process before each reload, from the fifth one on."""
    if len(sizes) < 2 * SETTLED:
        return []
    first, last = (statistics.median(part) for part in (sizes[:SETTLED], sizes[-SETTLED:]))
    return [
        Promise(
            f"memory of the last reloads beside those after reload {SETTLED}", last / first, GROWTH_BOUND, most=True
        ),
        Promise("most memory beside them", max(sizes) / first, GROWTH_BOUND, most=True),
    ]


if __name__ == "__main__":
    main()
