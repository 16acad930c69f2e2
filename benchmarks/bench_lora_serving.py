"""Steps of decoding and of prefill with adapters beside those without, and what the adapters' bytes alone would cost.

The backends are in one process and take turns step by step, so that a change of the machine's speed meets each. With
one thread, its time on a core is measured: other processes take none of it. The base is a Llama with random weights in
bf16, or a folder; its adapters of all linear layers, of rank 16 and of ranks 4 to 64, are those of a run of one step.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from tk.benchmarks.bench_lora import model_sizes
from tk.benchmarks.peers.environments import BUILD, peer_environment, python_of
from tk.checkpoint import Checkpoint
from tk.core.config import parse
from tk.core.cpu import read_cpu
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.native.binding.structures import Format
from tk.infer.engine.kernels.native.packing import stacks
from tk.infer.engine.program.adapters import adapted_matrices, padded_ranks
from tk.infer.engine.program.lower import lower
from tk.infer.engine.step.running_plan import NO_ADAPTER, RunningPlan
from tk.infer.engine.step.sampling_rows import SamplingRows
from tk.infer.engine.worker.adapter_order import AdapterOrder
from tk.infer.engine.worker.worker import load
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

RANKS: Final = (4, 8, 16, 16, 16, 32, 64, 64)  # of the adapters that share a batch
ONE: Final = 2  # the slot of one of rank 16
BLOCK: Final = 16  # tokens of a block of the cache
VOCAB: Final = 8192  # of the benchmark's own model and tokenizer


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step: the sequences of a batch, the tokens of each that are cached, and those that the step computes."""

    name: str
    batch: int
    cached: int
    tokens: int

    def plan(self, adapters: Sequence[int]) -> RunningPlan:
        """Returns the plan of the step in which sequence i has the adapter i, in turn; the last token has logits."""
        blocks = (self.cached + self.tokens) // BLOCK + 1
        tables = np.arange(1, 1 + self.batch * blocks, dtype=np.int32).reshape(self.batch, blocks)
        places = np.tile(np.arange(self.cached, self.cached + self.tokens, dtype=np.int32), self.batch)
        sequence = np.repeat(np.arange(self.batch), self.tokens)
        last = (np.arange(self.batch) + 1) * self.tokens - 1
        return RunningPlan(
            tokens=(7 * sequence + places + 1).astype(np.int32),
            positions=places,
            slots=(tables[sequence, places // BLOCK] * BLOCK + places % BLOCK).astype(np.int32),
            span_length=np.full(self.batch, self.tokens, np.int32),
            block_tables=tables,
            rows=SamplingRows.scoring(np.stack([last, last * 0, last * 0 - 1], axis=1).astype(np.int32)),
            adapters=np.array([adapters[i % len(adapters)] for i in range(self.batch)], np.int32),
        )


STEPS: Final = (
    *(MeasuredStep(f"decode, batch {batch}", batch, 32, 1) for batch in (1, 8, 32)),
    MeasuredStep("prefill, 8 x 64 tokens", 8, 0, 64),
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes that a step of decoding reads at least: of the base's weights, and of each adapter's factors."""

    base: int
    adapters: tuple[int, ...]

    @staticmethod
    def of(base: Path, weight_dtype: str) -> "Bytes":
        """Returns those of a base and of adapters of RANKS, padded by their own ranks as kernels have them."""
        program = lower(decoder_spec(stored_config(Checkpoint.open(base))))
        factors = (
            sum(
                2 * (padded_ranks(program, each, rank) * each.in_features + rank * each.out_features)
                for each in adapted_matrices(program)
            )
            for rank in RANKS
        )
        packed = dict(stacks(program, weight_dtype)).values()
        return Bytes(sum(each.count * each.matrix_bytes(Format.BF16, 2) for each in packed), tuple(factors))

    def share(self, slots: Sequence[int], batch: int) -> float:
        """Returns the speed that the bytes leave to a batch: the base's share of what its step reads."""
        used = {slots[i % len(slots)] for i in range(batch)} - {NO_ADAPTER}
        return self.base / (self.base + sum(self.adapters[slot] for slot in used))


def train(folder: Path, model: dict[str, Any], **sections: Any) -> Path:
    """Trains for a step, unless an earlier benchmark did; returns the run folder."""
    if (folder / "LATEST").exists():
        return folder
    data: dict[str, Any] = {
        "model": model,
        "data": {"cache": ".build/bench/stdlib", "vocab_size": VOCAB},
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": 32, "eval_rows": 1},
        "precision": {"params": "bf16"},
        "checkpoint": {"dir": str(folder)},
    }
    config = parse(data | sections, TrainConfig, "the benchmark")
    Trainer(config, Mesh.alone(config.layout(1))).fit()
    return folder


def backends(base: Path, adapters: Sequence[Path], weight_dtype: str, threads: int) -> tuple[Backend, Backend]:
    """Returns a backend that can hold no adapter, and one that holds all of them."""
    job = Job(str(base), "native", "bf16", "bf16", 160, 0, BLOCK, 512, threads=threads, weight_dtype=weight_dtype)
    full = replace(job, adapter_slots=len(adapters), max_adapter_rank=max(RANKS))
    plain, beside = load(job), load(full)
    config = stored_config(Checkpoint.open(base)).model_dump(mode="json")
    for slot, path in enumerate(adapters):
        order = AdapterOrder(slot, str(path), Checkpoint.open(path).folder.fingerprint, config)
        beside.pack_adapter(slot, order.carry_out(full))()
    return plain, beside


def measure(
    work: MeasuredStep, ways: Sequence[tuple[Backend, Sequence[int]]], rounds: int, threads: int
) -> list[list[float]]:
    """Returns the seconds of the step each way, after two rounds that warm up; a long step has half of the rounds."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    planned = [(backend, work.plan(slots)) for backend, slots in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(2 + (rounds if work.tokens == 1 else rounds // 2)):
        for found, (backend, plan) in zip(seconds, planned, strict=True):
            start = clock()
            backend.logits(plan)
            if number > 1:
                found.append(clock() - start)
    return seconds


def show(work: MeasuredStep, ways: Sequence[Sequence[int]], seconds: Sequence[Sequence[float]], read: Bytes) -> None:
    """Prints a row: milliseconds of the first way, and the speed of the others as a share of it."""
    cells = [f"{1e3 * statistics.median(seconds[0]):.1f}"]
    for slots, found in zip(ways[1:], seconds[1:], strict=True):
        share = statistics.median(one / other for one, other in zip(seconds[0], found, strict=True))
        cells.append(f"{share:.3f}")
        if slots[0] != NO_ADAPTER:
            cells.append(f"{read.share(slots, work.batch):.3f}" if work.tokens == 1 else "")
    click.echo(f"| {work.name} | {' | '.join(cells)} |")


def vllm_lines(folder: Path, base: Path, adapters: Sequence[Path], threads: int, rounds: int) -> Iterator[list[Any]]:
    """Yields the lines of peers/vllm_adapters.py, with a base and adapters exported below a folder."""
    exported = [folder / "exported", *(folder / f"peft-{number}" for number in range(len(adapters)))]
    for source, target in zip([base, *adapters], exported, strict=True):
        if not target.exists():
            command = [sys.executable, "-m", "tk", "export", str(source), str(target)]
            subprocess.run(command, check=True, stdout=sys.stderr)
    command = [str(python_of("vllm")), "-m", "tk.benchmarks.peers.vllm_adapters", str(exported[0]), str(threads)]
    command += [str(rounds), *map(str, exported[1:])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | peer_environment()) as process:
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            yield json.loads(line)


def show_vllm(lines: Iterable[list[Any]]) -> None:
    """Prints a table of vLLM's milliseconds, and of the speed with adapters as a share of that without."""
    click.echo("\nvLLM, bf16\n\n| | base, ms | one of rank 16, ms | share | 8 mixed, ms | share |")
    click.echo("|---|---|---|---|---|---|")
    for name, base, *others in lines:
        cells = [f"{1e3 * statistics.median(base):.1f}"]
        for found in others:
            share = statistics.median(one / other for one, other in zip(base, found, strict=True))
            cells += [f"{1e3 * statistics.median(found):.1f}", f"{share:.3f}"]
        click.echo(f"| {name} | {' | '.join(cells)} |")


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A folder to serve in place of random weights.")
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--rounds", default=30, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option(
    "--weight-dtype",
    "weight_dtypes",
    type=click.Choice(["bf16", "int8", "int4"]),
    default=("bf16", "int8", "int4"),
    multiple=True,
    show_default=True,
)
@click.option("--vllm", is_flag=True, help="Measure vLLM's CPU build, too, which is installed on first use.")
def main(
    model: Path | None, hidden: int, layers: int, rounds: int, threads: int, weight_dtypes: tuple[str, ...], vllm: bool
) -> None:
    """Print a table in Markdown per dtype of the base's weights."""
    cpu = read_cpu()
    click.echo(f"{cpu.model}, {', '.join(cpu.instruction_sets)}; threads {threads}, rounds {rounds}")
    name = model.name if model else f"hidden {hidden}, {layers} layers"
    folder = BUILD / "bench" / "lora-serving" / name.replace(", ", "-").replace(" ", "-")
    sizes = model_sizes(hidden, layers) | {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    base = model or train(folder / "base", sizes)
    adapters = [
        train(folder / f"adapter-{number}", {"init": str(base)}, lora={"rank": rank})
        for number, rank in enumerate(RANKS)
    ]
    ways = ([NO_ADAPTER], [NO_ADAPTER], [ONE], range(len(RANKS)))
    for weight_dtype in weight_dtypes:
        plain, beside = backends(base, adapters, weight_dtype, threads)
        click.echo(f"\n{name}, {weight_dtype}\n")
        click.echo("| | base, ms | none used of 8 | one of rank 16 | by its bytes | 8 mixed | by their bytes |")
        click.echo("|---|---|---|---|---|---|---|")
        for work in STEPS:
            turns = [(plain, ways[0]), *((beside, slots) for slots in ways[1:])]
            show(work, ways, measure(work, turns, rounds, threads), Bytes.of(base, weight_dtype))
    if vllm:
        show_vllm(vllm_lines(folder, base, adapters, threads, rounds))


if __name__ == "__main__":
    main()
