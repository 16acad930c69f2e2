"""Training speed and memory of tk, transformers, DeepSpeed and FSDP2 on the same model of 32 M parameters, in turn.

DeepSpeed runs in an environment of its own, made on first use (peers/environments.py); --no-deepspeed leaves it out.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from tk.benchmarks.peers.environments import peer_environment, python_if_possible

PEERS = "tk.benchmarks.peers"
PRODUCTS = "matrix products of as many flops"
SPEED = re.compile(r"(\d+(?:\.\d+)?) tok/s")


@dataclass(slots=True)
class TrainingContender:
    """One way to train.

    Attributes:
        name: the name in the table.
        command: the command of a run.
        num_ranks: the number of ranks.
        own: whether the command is started once per rank, with the rank as its last argument.
        speeds: the tokens per second of each run.
        peaks: the peak memory of each run, in bytes.
    """

    name: str
    command: list[str]
    num_ranks: int = 1
    own: bool = False
    speeds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Measures one run."""
        if self.own:
            self._measure([[*self.command, str(rank)] for rank in range(self.num_ranks)])
        else:
            self._measure([self.command])

    def _measure(self, commands: list[list[str]]) -> None:
        threads = str(2 // self.num_ranks)
        with tempfile.TemporaryDirectory() as folder:
            environment = (
                os.environ
                | peer_environment()
                | {
                    "OMP_NUM_THREADS": threads,
                    "TK_BENCH_STORE": f"{folder}/store",
                    "TK_BENCH_RUN": f"{folder}/run",
                }
            )
            processes = [
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for command in commands
            ]
            peak = PeakMemory(processes)
            outputs = [process.communicate() for process in processes]
            self.peaks.append(peak.stop())
        found = SPEED.search(outputs[0][0])
        if found is None:
            raise SystemExit(f"{self.name} printed no tokens/s:\n{outputs[0][0]}\n{outputs[0][1][-2000:]}")
        self.speeds.append(float(found.group(1)))


class PeakMemory:
    """The largest resident memory of any one of some processes and their children, sampled five times a second."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._roots = {process.pid for process in processes}
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Ends the sampling and returns the largest memory in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            family = set(self._roots)
            for status in sorted(Path("/proc").glob("[0-9]*/status"), key=lambda path: int(path.parent.name)):
                with suppress(OSError):
                    text = status.read_text()
                    if family & {int(text.split("PPid:")[1].split()[0]), int(status.parent.name)}:
                        family.add(int(status.parent.name))
                        highest = text.split("VmHWM:")[1].split()[0] if "VmHWM:" in text else "0"
                        self._peak = max(self._peak, int(highest) * 1024)


def contenders(deepspeed: Path | None) -> list[TrainingContender]:
    """Returns all contenders; `deepspeed` is the interpreter of DeepSpeed's environment, or None to leave it out."""
    python, torchrun = sys.executable, ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    own = [python, "-m", "tk.benchmarks.training_rank"]
    found = [
        TrainingContender(PRODUCTS, [python, "-m", "tk.benchmarks.matrix_product"]),
        TrainingContender("transformers, autocast", [python, "-m", f"{PEERS}.transformers_train", "eager"]),
        TrainingContender("transformers, autocast + compile", [python, "-m", f"{PEERS}.transformers_train", "compile"]),
        TrainingContender("tk, one process", [*own, "1", "1", "1", "0", "0"], 1, own=True),
        TrainingContender("tk, one process + compile", [*own, "1", "1", "1", "0", "1"], 1, own=True),
    ]
    for stage in (1, 2, 3):
        found.append(TrainingContender(f"tk dp 2, ZeRO-{stage}", [*own, "1", "1", "2", str(stage), "0"], 2, own=True))
        if deepspeed:
            script = ["-m", f"{PEERS}.deepspeed_train", str(stage)]
            found.append(TrainingContender(f"DeepSpeed ZeRO-{stage}", [str(deepspeed), *torchrun, *script], 2))
    for mode, what in (("keep", "kept after forward"), ("reshard", "resharded after forward")):
        script = ["-m", f"{PEERS}.fsdp_train", mode]
        found.append(TrainingContender(f"FSDP2, {what}", [python, *torchrun, *script], 2))
    found.append(TrainingContender("tk dp 2", [*own, "1", "1", "2", "0", "0"], 2, own=True))
    found.append(TrainingContender("tk tp 2", [*own, "2", "1", "1", "0", "0"], 2, own=True))
    found.append(TrainingContender("tk pp 2", [*own, "1", "2", "1", "0", "0"], 2, own=True))
    return found


@click.command()
@click.option("--deepspeed/--no-deepspeed", default=True, show_default=True, help="Include DeepSpeed.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default="", help="Contenders whose name contains this.")
def main(deepspeed: bool, rounds: int, only: str) -> None:
    """Run every contender once per round, and print medians of the speed, also as a share of that of matrix products
    alone, and the peak memory of the largest process.
    """
    found = contenders(python_if_possible("deepspeed") if deepspeed else None)
    runs = [one for one in found if only in one.name or one.name == PRODUCTS]
    for number in range(rounds):
        for contender in runs:
            start = time.perf_counter()
            contender.run()
            took = time.perf_counter() - start
            print(f"round {number + 1}: {contender.name}: {contender.speeds[-1]:.0f} tok/s ({took:.0f} s)", flush=True)
    limit = statistics.median(runs[0].speeds)
    print("\n| | processes x threads | tokens/s | of products | peak MiB |\n|---|---|---|---|---|")
    for contender in runs:
        speed, shape = statistics.median(contender.speeds), f"{contender.num_ranks} x {2 // contender.num_ranks}"
        peak = statistics.median(contender.peaks) / 2**20
        print(f"| {contender.name} | {shape} | {speed:.0f} | {speed / limit:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
