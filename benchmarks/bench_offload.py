"""Offload to disk: updates of states in a file beside plain threads that copy as many bytes, and training beside none.

The plain threads read one file and write another, both past the page cache, in requests as large as ours. A step with
everything on disk may take longer than one without by what its reads and writes take at the speed of these threads,
less the forward pass of the first micro-batch, in which an update goes on.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import click
import torch

from tk.benchmarks.training_rank import MODEL
from tk.checkpoint.files import storage
from tk.core.config import parse
from tk.core.cpu import read_cpu
from tk.core.process import keep_freed_memory
from tk.core.state_pieces import PIECE
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.planning.moved_bytes import Moved, in_all
from tk.train.planning.plan import make_plan
from tk.train.run.trainer import Trainer
from tk.train.zero.adamw_rule import AdamWFactors, AdamWStreams, adamw_rule
from tk.train.zero.states.buffer import PageBuffer
from tk.train.zero.states.disk_states import DiskStates
from tk.train.zero.states.state_file import CHUNK, THREADS

SLOTS: Final = ("master", "exp_avg", "exp_avg_sq")
BUCKET: Final = 2**24  # elements
FACTORS: Final = AdamWFactors(step=7, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_scale=0.5)
OFFLOADS: Final[Mapping[str, dict[str, str]]] = MappingProxyType(
    {
        "none": {},
        "optimizer on disk": {"optimizer": "disk"},
        "all on disk": dict.fromkeys(("optimizer", "gradients", "parameters"), "disk"),
    }
)


class StateUpdate:
    """Updates of fp32 states on disk, with gradients and bf16 parameters in memory.

    Args:
        folder: the folder of the file.
        num_buckets: the number of buckets of BUCKET elements.
    """

    def __init__(self, folder: Path, num_buckets: int) -> None:
        self.store = DiskStates(
            [dict.fromkeys(SLOTS, torch.float32)] * num_buckets, [BUCKET] * num_buckets, folder, 8, pinned=False
        )
        self.order = range(num_buckets)
        self.nbytes = num_buckets * BUCKET * 4 * len(SLOTS)
        self._grads = torch.full((PIECE,), 1e-3)
        self._rounded = torch.empty(PIECE, dtype=torch.bfloat16)
        self._rule = adamw_rule(torch.device("cpu"))

    def __call__(self) -> None:
        """Makes one update of all, and returns once all is written."""
        with self.store.changing(self.order) as ranges:
            for each in ranges:
                count = each.end - each.begin
                master, exp_avg, exp_avg_sq = (each.slots[slot] for slot in SLOTS)
                streams = AdamWStreams(master, exp_avg, exp_avg_sq, self._grads[:count], self._rounded[:count])
                self._rule(streams, FACTORS)
        for begin in range(0, BUCKET, PIECE):  # a read waits for the write of its piece
            self.store.read(SLOTS[0], self.order[-1], begin, begin + 1)


class PlainThreads:
    """Threads that read one file and write another, past the page cache.

    Args:
        folder: the folder of both files.
        nbytes: the bytes to read, and to write.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._fds = [storage.open_unnamed(folder) for _ in range(2)]
        for fd in self._fds:
            storage.reserve(fd, nbytes)
        self._direct = [storage.open_direct(fd) or fd for fd in self._fds]
        self._offsets = range(0, nbytes, CHUNK)
        self._buffers = [PageBuffer(CHUNK).memory for _ in range(THREADS)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(CHUNK)
        self._copy(self._buffers[0], self._offsets, writes_only=True)

    def _copy(self, buffer: memoryview, offsets: Sequence[int], writes_only: bool = False) -> None:
        source, target = self._direct
        for offset in offsets:
            if not writes_only:
                os.preadv(source, [buffer], offset)
            os.pwrite(source if writes_only else target, buffer, offset)

    def __call__(self) -> None:
        """Copies all."""
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._copy, self._buffers, [self._offsets[number::THREADS] for number in range(THREADS)]))


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def compare_tier(folder: Path, gib: float, rounds: int) -> float:
    """Prints the speed of updates beside that of plain threads; returns bytes per second of the plain threads."""
    update = StateUpdate(folder, max(1, round(gib * 2**30 / (BUCKET * 12))))
    plain = PlainThreads(folder, update.nbytes)
    pairs = [(seconds_of(update), seconds_of(plain)) for _ in range(rounds + 1)][1:]
    update.store.close()
    ours, theirs = median(mine for mine, _ in pairs), median(other for _, other in pairs)
    ratio = median(plain_time / our_time for our_time, plain_time in pairs)
    moved = 2 * update.nbytes
    print(f"{update.nbytes / 2**30:.2f} GiB of states are read and written, median of {rounds} rounds, in turn:\n")
    print("| | seconds | MB/s |\n|---|---|---|")
    print(f"| update of states on disk | {ours:.2f} | {moved / ours / 1e6:,.0f} |")
    print(f"| {THREADS} plain threads | {theirs:.2f} | {moved / theirs / 1e6:,.0f} |")
    print(f"\nspeed of the update beside plain threads: {ratio:.2f} (promised: 0.8)\n", flush=True)
    return moved / theirs


def configuration(folder: Path, name: str, offload: dict[str, str]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"cache": ".build/bench/stdlib"},
        "train": {"global_batch_size": 2, "micro_batch_size": 1, "seq_len": 128},
        "zero": {"stage": 3},
        "offload": offload,
        "checkpoint": {"dir": str(folder / name)},
    }


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.step()
    trainer.engine.optimizer.finish()


def forward_seconds(trainer: Trainer) -> float:
    """Returns the time from the begin of a step to the end of the first forward pass of its last layer."""
    times: list[float] = []
    last = list(trainer.stages[-1].modules())[-1]
    handle = last.register_forward_hook(lambda module, inputs, output: times.append(time.perf_counter()))
    begun = time.perf_counter()
    trainer.step()
    handle.remove()
    return times[0] - begun


def compare_training(folder: Path, rate: float, rounds: int, steps: int) -> None:
    """Prints the time of a step with everything on disk beside that of a step without offload."""
    trainers: dict[str, Trainer] = {}
    moved: dict[str, Moved] = {}
    for name, offload in OFFLOADS.items():
        config = parse(configuration(folder, name, offload), TrainConfig, name)
        moved[name] = in_all(make_plan(config, 1).moved)
        trainers[name] = Trainer(config, Mesh.build(config.layout(1), 4))
    seconds: dict[str, list[float]] = {name: [] for name in trainers}

    for number in range(rounds + 1):
        for name, trainer in trainers.items():
            taken = seconds_of(partial(train, trainer, steps)) / steps
            seconds[name] += [taken] if number else []
    forward = median(forward_seconds(trainers["none"]) for _ in range(rounds))
    print(f"{steps} steps at a time, with the end of the last update, median of {rounds} rounds, in turn.")
    print(f"The forward pass of the first micro-batch takes {forward:.2f} s.\n")
    print("| | s/step | read and written | by plain threads | more than none | may be |\n|---|---|---|---|---|---|")
    for name, all_taken in seconds.items():
        nbytes = moved[name].read + moved[name].written
        io, more = nbytes / rate, median(mine - other for mine, other in zip(all_taken, seconds["none"], strict=True))
        may = 1.15 * max(0.0, io - forward)
        print(
            f"| {name} | {median(all_taken):.2f} | {nbytes / 1e6:,.0f} MB | {io:.2f} s | {more:.2f} s | {may:.2f} s |"
        )


@click.command()
@click.option("--folder", default=".build/bench", show_default=True, type=click.Path(path_type=Path))
@click.option("--gib", default=1.0, show_default=True, help="States of the first comparison, in GiB.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=2, show_default=True, help="Steps of training at a time.")
@click.option("--threads", default=2, show_default=True)
def main(folder: Path, gib: float, rounds: int, steps: int, threads: int) -> None:
    """Print both comparisons."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    folder.mkdir(parents=True, exist_ok=True)
    cpu, load = read_cpu(), os.getloadavg()[0]
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets)}; {threads} threads; load {load:.1f}\n")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        rate = compare_tier(Path(name), gib, rounds)
        compare_training(Path(name), rate, rounds, steps)


if __name__ == "__main__":
    main()
