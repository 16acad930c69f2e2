"""Context and expert parallelism beside data and tensor parallelism: training steps on the same tokens, in turn.

    python benchmarks/bench_axes.py --rounds 5
    python benchmarks/bench_axes.py --only Mixtral --no-deepspeed

Each layout has two ranks of one thread. The ranks of all layouts of a model run at the same time, but step in turn, so
that a machine whose speed drifts slows all alike; every other round has the opposite order. DeepSpeed's MoE runs in an
environment of its own, made on first use (peers/environments.py).
"""

import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import click

from tk.benchmarks.axes_rank import WORLD_SIZE
from tk.benchmarks.peers.environments import peer_environment, python_if_possible
from tk.benchmarks.rank_processes import RankProcesses, Step
from tk.core.cpu import read_cpu

Settings = dict[str, dict[str, Any]]


def _keys(file: str) -> dict[str, Any]:
    """Returns the keys of [model] in a file of this folder."""
    keys: dict[str, Any] = json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    return keys


LLAMA: Final = {**_keys("training_model.json"), "num_hidden_layers": 2, "max_position_embeddings": 8192}
MIXTRAL: Final = _keys("training_mixtral.json")


class AxisWorkload(NamedTuple):
    """A model with its rows, and the layouts that train it; the first is the one that the others are compared with.

    Attributes:
        name: the name in the table.
        settings: the sections of the configuration that all layouts have.
        rows: the rows of a step.
        layouts: [parallel] of each layout, by name.
        promised: the share of the first layout's tokens/s that the others must reach.
    """

    name: str
    settings: Settings
    rows: int
    layouts: dict[str, dict[str, Any]]
    promised: float

    def layout(self, parallel: dict[str, Any]) -> Settings:
        """Returns the configuration of a layout, which computes each of its rows in one micro-batch."""
        rows = {"global_batch_size": self.rows, "micro_batch_size": self.rows // parallel.get("dp", 1)}
        return self.settings | {"train": self.settings["train"] | rows, "parallel": parallel}


WORKLOADS: Final = (
    AxisWorkload(
        "Llama, 2 rows of 8,192",
        {"model": LLAMA, "train": {"seq_len": 8192}},
        2,
        {
            "dp 2": {"dp": 2},
            "cp 2, gather": {"dp": 1, "cp": 2, "cp_mode": "gather"},
            "cp 2, ulysses": {"dp": 1, "cp": 2, "cp_mode": "ulysses"},
        },
        0.85,
    ),
    AxisWorkload(
        "Mixtral, 8 rows of 512",
        {"model": MIXTRAL, "train": {"seq_len": 512}},
        8,
        {
            "tp 2": {"tp": 2, "dp": 1},
            "dp 2, ep 2": {"dp": 2, "ep": 2},
            "tp 2, ep 2": {"tp": 2, "dp": 1, "ep": 2},
        },
        0.9,
    ),
)
DEEPSPEED: Final = "DeepSpeed MoE, ep 2"


def started(command: list[str], folder: Path) -> RankProcesses:
    """Starts the ranks of a contender, which keep their files in a folder of their own."""
    folder.mkdir()
    own = {"OMP_NUM_THREADS": "1", "TK_BENCH_STORE": str(folder / "store"), "TK_BENCH_RUN": str(folder / "run")}
    return RankProcesses([*command, "{rank}"], WORLD_SIZE, os.environ | peer_environment() | own)


def commands(workload: AxisWorkload, precision: str, deepspeed: bool) -> dict[str, list[str]]:
    """Returns the commands of a workload's contenders by name."""
    rank = [sys.executable, "-m", "tk.benchmarks.axes_rank"]
    found = {
        name: [*rank, json.dumps(workload.layout(parallel) | {"precision": {"params": precision}})]
        for name, parallel in workload.layouts.items()
    }
    python = python_if_possible("deepspeed") if deepspeed and workload.settings["model"] is MIXTRAL else None
    if python:
        rows, length = workload.rows // WORLD_SIZE, workload.settings["train"]["seq_len"]
        shape = json.dumps({"model": MIXTRAL, "rows": rows, "length": length, "precision": precision})
        found[DEEPSPEED] = [str(python), "-m", "tk.benchmarks.peers.deepspeed_moe", shape]
    return found


def measure(found: dict[str, list[str]], rounds: int) -> dict[str, list[Step]]:
    """Runs all contenders in turn, after a step each to warm up, and returns their steps."""
    steps: dict[str, list[Step]] = {name: [] for name in found}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        ranks = {}
        for name, command in found.items():
            ranks[name] = started(command, Path(folder) / name.replace(" ", "-"))
            stack.callback(ranks[name].close)
            ranks[name].step()
        for number in range(rounds):
            for name in list(ranks)[:: -1 if number % 2 else 1]:
                steps[name].append(ranks[name].step())
    return steps


def rows(workload: AxisWorkload, steps: dict[str, list[Step]]) -> list[str]:
    """Returns a workload's rows of the table."""
    first, tokens = next(iter(steps)), workload.rows * workload.settings["train"]["seq_len"]
    found = []
    for name, of_name in steps.items():
        ratios = [base.seconds / each.seconds for base, each in zip(steps[first], of_name, strict=True)]
        used = [base.cpu_seconds / each.cpu_seconds for base, each in zip(steps[first], of_name, strict=True)]
        seconds, cpu_seconds = (statistics.median(side) for side in zip(*of_name, strict=True))
        promised = "" if name in (first, DEEPSPEED) else f"{workload.promised}"
        found.append(
            f"| {workload.name} | {name} | {seconds:.2f} | {tokens / seconds:,.0f} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f}-{max(ratios):.2f} | {promised} | {cpu_seconds:.2f} | {statistics.median(used):.2f} |"
        )
    return found


@click.command()
@click.option("--rounds", default=5, show_default=True, help="The steps of each layout that count.")
@click.option("--only", default="", help="Models whose name contains this.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True)
@click.option("--deepspeed/--no-deepspeed", default=True, show_default=True, help="Include DeepSpeed's MoE.")
def main(rounds: int, only: str, precision: str, deepspeed: bool) -> None:
    """Print the tokens/s of each layout, as a share of the first layout's: medians and ranges over rounds.

    CPU s is the CPU time of the rank that used most in a step. It does not count waiting, but moves little if other
    programs run.

    \b
    Example:
        python benchmarks/bench_axes.py --rounds 5 --only Llama
    """
    cpu = read_cpu()
    print(f"CPU: {cpu.model} ({', '.join(cpu.instruction_sets)}); {WORLD_SIZE} ranks of one thread, {precision}\n")
    print("| model | layout | s/step | tokens/s | of the first | range | promised | CPU s | of the first |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for workload in WORKLOADS:
        if only in workload.name:
            steps = measure(commands(workload, precision, deepspeed), rounds)
            print("\n".join(rows(workload, steps)), flush=True)


if __name__ == "__main__":
    main()
