"""Training steps and checkpoint commands of two checkouts, as ratios, to see whether a change made anything slower.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_checkouts.py /tmp/before .
    python benchmarks/compare_checkouts.py /tmp/before . --shape benchmarks/training_mixtral.json --gigabytes 0

The ranks of both checkouts run at the same time, but step in turn, so that a machine whose speed drifts slows both
alike. A pair is one step (or one command) of each, and the first of the two alternates.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import click

from tk.benchmarks.bench_checkpoint import evict, make_source, model
from tk.benchmarks.rank_processes import RankProcesses
from tk.core.layout import Layout

TRAINING = {
    "one process": (1, 1, 1, 0),
    "dp 2, ZeRO-0": (1, 1, 2, 0),
    "dp 2, ZeRO-1": (1, 1, 2, 1),
    "dp 2, ZeRO-2": (1, 1, 2, 2),
    "dp 2, ZeRO-3": (1, 1, 2, 3),
    "tp 2": (2, 1, 1, 0),
    "pp 2": (1, 2, 1, 0),
}
WARM_UP = 2
T = TypeVar("T")


class Checkout:
    """One version of tk, which processes started with `environment` import as `tk`."""

    def __init__(self, root: Path, work: Path, name: str, precision: str, shape: Path | None = None) -> None:
        self.work = work / name
        self.work.mkdir()
        (self.work / "tk").symlink_to(root.resolve())
        self.scripts = self.work / "benchmarks"  # its own: they import modules where that version has them
        self.scripts.mkdir()
        for file in ("checkpoint_peers.py", "training_rank.py", "training_model.json"):
            shutil.copy(root / "benchmarks" / file, self.scripts)
        if shape:
            shutil.copy(shape, self.scripts / "training_model.json")
        self.environment = os.environ | {
            "PYTHONPATH": str(self.work),
            "PYTHONDONTWRITEBYTECODE": "",  # an installed tk is compiled; compiling it in each run takes 0.1 s
            "PYTHONPYCACHEPREFIX": str(self.work / "bytecode"),
            "TK_BENCH_PRECISION": precision,
        }

    def command(self, *words: str) -> Callable[[], float]:
        """Returns a function that runs a `tk` command and returns its seconds."""
        line = [sys.executable, str(self.scripts / "checkpoint_peers.py"), *words]

        def run() -> float:
            start = time.perf_counter()
            subprocess.run(line, check=True, capture_output=True, env=self.environment)
            return time.perf_counter() - start

        return run


def started(checkout: Checkout, layout: Sequence[int], name: str) -> RankProcesses:
    """Starts the ranks of a layout."""
    num_ranks, folder = layout[0] * layout[1] * layout[2], checkout.work / name
    environment = checkout.environment | {
        "OMP_NUM_THREADS": str(2 // num_ranks),
        "OMP_WAIT_POLICY": "passive",  # threads that spin would slow the other checkout's steps
        "TK_BENCH_STORE": f"{folder}-store",
        "TK_BENCH_RUN": f"{folder}-run",
    }
    script = [sys.executable, str(checkout.scripts / "training_rank.py"), *map(str, layout), "0"]
    return RankProcesses([*script, "{rank}", "on-request"], num_ranks, environment)


def in_turn(before: Callable[[], T], after: Callable[[], T], pairs: int) -> list[tuple[T, T]]:
    """Returns the results of both sides, pair by pair."""
    found = []
    for number in range(pairs):
        if number % 2:
            second, first = after(), before()
        else:
            first, second = before(), after()
        found.append((first, second))
    return found


def row(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Returns a row of the table."""
    ratios = sorted(after / before for before, after in pairs)
    seconds = [statistics.median(side) for side in zip(*pairs, strict=True)]
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    middle = statistics.median(ratios)
    return f"| {name} | {seconds[0]:.3f} | {seconds[1]:.3f} | {middle:.3f} | {low:.3f}-{high:.3f} |"


def training(before: Checkout, after: Checkout, name: str, pairs: int) -> str:
    """Measures the steps of one layout and returns its rows: seconds, and the CPU time of a rank."""
    with ExitStack() as stack:
        ranks = []
        for checkout in (before, after):
            ranks.append(started(checkout, TRAINING[name], name))
            stack.callback(ranks[-1].close)
        in_turn(ranks[0].step, ranks[1].step, WARM_UP)
        found = in_turn(ranks[0].step, ranks[1].step, pairs)
    used = [(old.cpu_seconds, new.cpu_seconds) for old, new in found]
    return f"{row(name, [(old.seconds, new.seconds) for old, new in found])}\n{row(f'{name}, CPU time', used)}"


def checkpoints(before: Checkout, after: Checkout, work: Path, gigabytes: float, pairs: int) -> None:
    """Measures commands on one checkpoint at tp 4, from a cold page cache, and prints their rows."""
    source, target = make_source(work / "run", model(int(gigabytes * 1e9)), Layout(tp=4)), work / "target"
    commands = {
        "reshard tp 4 -> 1": ("tk_command", "reshard", str(source), str(target), "--tp", "1", "--force"),
        "reshard tp 4 -> 2": ("tk_command", "reshard", str(source), str(target), "--tp", "2", "--force"),
        "export": ("tk_command", "export", str(source), str(target), "--force"),
        "load tp 4 -> 1": ("tk_load", str(source), "1", "0"),
        "verify": ("tk_command", "verify", str(source)),
    }

    def cold(run: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            evict(source)
            return run()

        return measured

    for name, words in commands.items():
        sides = cold(before.command(*words)), cold(after.command(*words))
        in_turn(*sides, 1)  # compiles the modules, and leaves a target that every measured run replaces
        print(row(name, in_turn(*sides, pairs)), flush=True)


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--pairs", default=10, show_default=True)
@click.option("--gigabytes", default=2.0, show_default=True, help="Size of the checkpoint; 0: training only.")
@click.option("--only", default="", help="Training layouts whose name contains this; none: checkpoints only.")
@click.option(
    "--shape",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON file with the keys of [model] of the training rows.  [default: training_model.json]",
)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".build"), show_default=True)
def main(
    before: Path,
    after: Path,
    pairs: int,
    gigabytes: float,
    only: str,
    shape: Path | None,
    precision: str,
    folder: Path,
) -> None:
    """Print the seconds of two checkouts and the ratios AFTER / BEFORE of pairs: their median and middle half."""
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder) as name:
        work = Path(name).resolve()
        old, new = (
            Checkout(root, work, name, precision, shape) for root, name in ((before, "before"), (after, "after"))
        )
        print("| | before, s | after, s | after / before | middle half |\n|---|---|---|---|---|", flush=True)
        for layout in TRAINING:
            if only in layout:
                print(training(old, new, layout, pairs), flush=True)
        if gigabytes:
            checkpoints(old, new, work, gigabytes, pairs)


if __name__ == "__main__":
    main()
