"""The sampler: microseconds of CPU time per row, by vocabulary, options, shape of the logits and number of rows.

python benchmarks/bench_sampler.py [--sampler numpy]
"""

import time
from typing import Any

import click
import numpy as np

from tk.core.cpu import read_cpu
from tk.infer.engine.kernels.sampler import numpy_sampler
from tk.infer.engine.kernels.sampler.native_sampler import native_sampler
from tk.infer.engine.kernels.sampler.sampler import Sample, run_sampler
from tk.infer.engine.step.sampling_rows import SamplingRows
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.infer.sampling_row import SamplingRow, pack

VOCABULARIES = (32_000, 49_152, 128_256, 262_144)
NUM_ROWS = (1, 8, 32)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9, 3,000 penalties": {"top_p": 0.9, "repetition_penalty": 1.1},
    "greedy, logprobs 5": {"temperature": 0.0, "num_top": 5},
}


def logits_of(shape_of_logits: str, num_rows: int, vocab: int) -> np.ndarray[Any, Any]:
    """Returns logits like a trained model's ("peaked": few likely tokens, the others 10 to 25 lower), or flat ones."""
    generator = np.random.default_rng(vocab)
    logits = generator.standard_normal((num_rows, vocab), np.float32)
    if shape_of_logits == "flat":
        return logits
    logits *= 2.5
    likely = generator.integers(0, vocab, (num_rows, 40))
    best = 18 - 3 * np.log(1 + np.arange(40, dtype=np.float32))
    np.put_along_axis(logits, likely, np.broadcast_to(best, likely.shape), axis=-1)
    return logits


def rows_of(options: dict[str, Any], num_rows: int, vocab: int, step: int) -> SamplingRows:
    """Returns rows with the same options and different noise."""
    counts = {}
    if "repetition_penalty" in options:
        penalized = np.random.default_rng(7).choice(vocab, 3000, replace=False).tolist()
        counts = {"counts": TokenCounts(dict.fromkeys(penalized, 1))}
    return pack(
        [
            SamplingRow(0, **{"temperature": 1.0, "seed": i, "new_number": step} | options | counts)
            for i in range(num_rows)
        ]
    )


def measure(sample: Sample, logits: np.ndarray[Any, Any], options: dict[str, Any], seconds: float) -> float:
    """Returns the microseconds of CPU time per row: the least of three rounds, each with other noise."""
    num_rows, vocab = logits.shape
    batches = [rows_of(options, num_rows, vocab, step) for step in range(3)]
    run_sampler(logits, batches[0], None, sample)
    rounds: list[float] = []
    for rows in batches:
        start, calls = time.process_time(), 0
        while time.process_time() - start < seconds:
            run_sampler(logits, rows, None, sample)
            calls += 1
        rounds.append((time.process_time() - start) / calls / num_rows)
    return min(rounds) * 1e6


@click.command()
@click.option("--sampler", type=click.Choice(["native", "numpy"]), default="native")
@click.option("--seconds", default=0.1, help="CPU time of a round.")
@click.option("--vocab", type=int, multiple=True, help="Only these vocabularies.")
@click.option("--rows", type=int, multiple=True, help="Only these numbers of rows.")
def main(sampler: str, seconds: float, vocab: tuple[int, ...], rows: tuple[int, ...]) -> None:
    native = native_sampler() if sampler == "native" else None
    if sampler == "native" and native is None:
        raise click.ClickException("no C compiler")
    print(f"CPU: {read_cpu().model}; sampler: {f'C, {native.unit}' if native else 'numpy'}; us of CPU time per row\n")
    columns = [(shape, number) for shape in ("peaked", "flat") for number in rows or NUM_ROWS]
    print("| vocabulary | options |", *(f" {shape}, {number} rows |" for shape, number in columns), sep="")
    print("|---|---|" + "---|" * len(columns))
    for size in vocab or VOCABULARIES:
        for name, options in OPTIONS.items():
            found = [
                measure(native or numpy_sampler.sample, logits_of(shape, number, size), options, seconds)
                for shape, number in columns
            ]
            print(f"| {size:,} | {name} |", *(f" {us:,.0f} |" for us in found), sep="", flush=True)


if __name__ == "__main__":
    main()
