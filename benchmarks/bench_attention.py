"""Attention of the native kernels alone: GFLOP/s of prompts by position, GB/s of decoding beside readers of its pages.

One thread's figures are of CPU time, the least of some runs; those of more threads are of the wall clock.
"""

import os
import time
from typing import Final

import click

from tk.benchmarks.serving.attention_limits import least, limits, page_readers
from tk.benchmarks.serving.attention_only import HEAD_DIM, HEADS, AttentionOnly
from tk.benchmarks.serving.in_turn import Promise
from tk.core.cpu import read_cpu
from tk.infer.engine.kernels.native.binding.library import Kernels, instruction_sets, load_kernels

STEP: Final = 1000  # tokens of a prompt's step
STARTS: Final = (0, 1000, 2000, 8000, 31000)  # of steps that are measured
LAYERS: Final = 30  # those of SmolLM2-135M: the cache exceeds all caches of the CPU
SEQUENCES: Final = 8
LENGTH: Final = 3000
FORMATS: Final = ("bf16", "int8", "k8v4")
LATE_BOUND: Final = 0.9
READ_BOUNDS: Final = {"bf16": 0.85, "int8": 0.70}


def prompts(kernels: Kernels, kv_dtype: str, runs: int) -> Promise:
    """Prints the speed of a prompt of 32,000 tokens in one layer, step by step."""
    made = AttentionOnly(kernels, kv_dtype, 1, 1, STARTS[-1] + STEP, STEP)
    made.fill(STARTS[-1] + STEP)
    found = {}
    for start in STARTS:
        operations = 4 * HEAD_DIM * HEADS * sum(range(start + 1, start + STEP + 1))
        found[start] = operations / least(lambda start=start: made.attend(start, STEP), runs)  # type: ignore[misc]
    made.close()
    speeds = "   ".join(f"from {start} {speed / 1e9:.1f}" for start, speed in found.items())
    print(f"{kernels.instruction_set} {kv_dtype}: prompts, GFLOP/s of {STEP} tokens: {speeds}", flush=True)
    return Promise(
        f"{kv_dtype}: the last tokens of 32,000 beside 2,000 to 3,000", found[31000] / found[2000], LATE_BOUND
    )


def decoding(kernels: Kernels, kv_dtype: str, threads: int, runs: int) -> tuple[float, float]:
    """Prints the bytes per second of a decoding step in all layers; returns it beside the best reader's, and alone."""
    made = AttentionOnly(kernels, kv_dtype, LAYERS, SEQUENCES, LENGTH + 32, 512, threads)
    made.fill(LENGTH)
    pieces, piece_bytes = made.pieces(LENGTH)
    ways = page_readers(pieces, piece_bytes, threads) | {"attention": lambda: made.attend(LENGTH - 1, 1)}
    clock = time.process_time if threads == 1 else time.perf_counter
    times = {name: float("inf") for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            times[name] = min(times[name], least(way, 1, clock))
    made.close()
    rates = {name: piece_bytes * len(pieces) / seconds for name, seconds in times.items()}
    speeds = "   ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
    print(f"{kernels.instruction_set} {kv_dtype}: decoding on {threads} threads, GB/s: {speeds}", flush=True)
    own = rates.pop("attention")
    return own / max(rates.values(), default=own), times["attention"]


def run(kernels: Kernels, threads: int, runs: int) -> list[Promise]:
    """Runs all parts for an instruction set."""
    if found := limits(kernels.instruction_set, runs):
        print(
            f"{kernels.instruction_set}: exp, sum and rounding take {found.weight_seconds * 1e9:.2f} ns of a score;"
            f" GFLOP/s of products and with exp: fp32 {found.floats / 1e9:.0f},"
            f" {found.ceiling(found.floats, HEAD_DIM) / 1e9:.0f};"
            f" int16 {found.integers / 1e9:.0f}, {found.ceiling(found.integers, HEAD_DIM) / 1e9:.0f}"
        )
    promises = [prompts(kernels, kv_dtype, runs) for kv_dtype in FORMATS]
    decoded = {kv_dtype: decoding(kernels, kv_dtype, threads, runs) for kv_dtype in FORMATS}
    for kv_dtype, bound in READ_BOUNDS.items():
        promises.append(Promise(f"{kv_dtype}: decoding beside the best reader", decoded[kv_dtype][0], bound))
    ratio = decoded["k8v4"][1] / decoded["int8"][1]
    return [*promises, Promise("k8v4: the time of a step beside int8", ratio, 1.0, most=True)]


@click.command()
@click.option("--set", "sets", multiple=True, type=click.Choice(instruction_sets()), help="An instruction set to run.")
@click.option("--threads", type=int, default=1, show_default=True, help="Threads of decoding.")
@click.option("--runs", type=int, default=7, show_default=True)
def main(sets: tuple[str, ...], threads: int, runs: int) -> None:
    """Print figures of each instruction set, the best one by default, and the promises that hold or are missed."""
    print(f"{read_cpu().model}, load {os.getloadavg()[0]:.1f}")
    for name in sets or instruction_sets()[-1:]:
        kernels = load_kernels(name)
        if kernels is None or kernels.refusal():
            raise click.ClickException(f"This machine cannot run the kernels for {name}.")
        for promise in run(kernels, threads, runs):
            print(promise.line())


if __name__ == "__main__":
    main()
