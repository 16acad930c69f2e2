"""Decode and prefill with adapters beside the same engine without any, and the gaps between tokens while others load.

All engines are in one process and take turns, so that a change of the machine's speed meets each. The base is a Llama
of the sizes below with random weights in bf16; its adapters of all linear layers, of rank 16 and of ranks 4 to 64, are
those of a run of one step. The case "gap" has one engine, whose four streams are measured in turn without loads and
while adapters of rank 64 are loaded again and again, under one name.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import click

from tk.benchmarks.bench_lora import model_sizes
from tk.core.config import parse
from tk.core.cpu import read_cpu
from tk.infer import AsyncLLM, SamplingParams
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

RANKS: Final = (4, 8, 16, 16, 16, 32, 64, 64)  # of the adapters that share a batch
PROMPT, NEW = 16, 48
GAPS: Final = 150  # of a stream in a round
PAUSE: Final = 0.05  # seconds between two loads


def train(folder: Path, sizes: dict[str, int], steps: int, **sections: Any) -> Path:
    """Trains for a moment and returns the run folder."""
    data: dict[str, Any] = {
        "model": sizes,
        "data": {"cache": ".build/bench/stdlib", "vocab_size": sizes["vocab_size"]},
        "train": {"steps": steps, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": 32, "eval_rows": 1},
        "precision": {"params": "bf16"},
        "checkpoint": {"dir": str(folder)},
    }
    config = parse(data | sections, TrainConfig, "the benchmark")
    Trainer(config, Mesh.alone(config.layout(1))).fit()
    return folder


async def seconds_of(llm: AsyncLLM, adapters: Sequence[str], prompt: int, new: int) -> float:
    """Returns the seconds of a batch in which request i has the adapter i."""
    params = SamplingParams(temperature=0.0, max_new_tokens=new, min_new_tokens=new)
    start = time.perf_counter()
    prompts = [[1 + (7 * i + j) % 4000 for j in range(prompt)] for i in range(len(adapters))]
    asked = (llm.generate([each], params, adapter=name) for each, name in zip(prompts, adapters, strict=True))
    await asyncio.gather(*asked)
    return time.perf_counter() - start


async def measure(engines: dict[str, tuple[AsyncLLM, Sequence[str]]], rounds: int) -> None:
    """Prints the rows of the table: each way, and its share of the first one's speed."""
    for batch in (1, 8, 32):
        decode: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name, (llm, adapters) in engines.items():
                asked = [adapters[i % len(adapters)] for i in range(batch)]
                short = await seconds_of(llm, asked, PROMPT, 1)
                whole = await seconds_of(llm, asked, PROMPT, NEW)
                if number:
                    decode[name].append((whole - short) / (NEW - 1))
        _print(f"decode, batch {batch}, ms per step", decode)
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, (llm, adapters) in engines.items():
            found = await seconds_of(llm, [adapters[0]] if len(adapters) == 1 else adapters, 512 // len(adapters), 1)
            if number:
                prefill[name].append(found)
    _print("prefill of 512 tokens, ms", prefill)


def _print(title: str, seconds: dict[str, list[float]]) -> None:
    first = next(iter(seconds.values()))
    for name, found in seconds.items():
        share = statistics.median(one / other for one, other in zip(first, found, strict=True))
        click.echo(f"| {title} | {name} | {1e3 * statistics.median(found):.1f} | {share:.2f} |")


async def token_gaps(llm: AsyncLLM) -> list[float]:
    """Returns the seconds between the tokens of four streams without adapters."""

    async def gaps() -> list[float]:
        params = SamplingParams(temperature=0.0, max_new_tokens=GAPS + 1, min_new_tokens=GAPS + 1)
        times = [time.perf_counter() async for _ in llm.stream(list(range(1, PROMPT + 1)), params)]
        return [after - before for before, after in pairwise(times)]

    return [gap for each in await asyncio.gather(*(gaps() for _ in range(4))) for gap in each]


async def token_gaps_beside(llm: AsyncLLM, adapters: Sequence[Path], loads: list[float]) -> list[float]:
    """Returns the same while adapters are loaded in turn; adds the seconds of each load to `loads`."""
    streams = asyncio.create_task(token_gaps(llm))
    for path in itertools.cycle(adapters):
        if streams.done():
            break
        begun = time.perf_counter()
        await llm.load_adapter("moving", path)
        loads.append(time.perf_counter() - begun)
        await asyncio.sleep(PAUSE)
    return streams.result()


async def run_gap(base: Path, adapters: Sequence[Path], rounds: int, weight_dtype: str) -> None:
    """Measures the gaps without loads and beside them, in turn, and prints the rows of the table."""
    common: dict[str, Any] = {"max_model_len": 1024, "kv_blocks": 512, "prefix_cache": False}
    quiet, beside, loads = list[float](), list[float](), list[float]()
    async with AsyncLLM(base, max_adapters=1, weight_dtype=weight_dtype, **common) as llm:
        await token_gaps_beside(llm, adapters, [])
        for _ in range(rounds):
            quiet += await token_gaps(llm)
            beside += await token_gaps_beside(llm, adapters, loads)
    each = f"{len(loads)} loads of {1e3 * statistics.median(loads):.0f} ms"
    for name, found in (("without loads", sorted(quiet)), (f"beside {each}", sorted(beside))):
        half, most = found[len(found) // 2], found[int(len(found) * 0.99)]
        click.echo(f"| {name} | {1e3 * half:.1f} | {1e3 * most:.1f} | {1e3 * found[-1]:.1f} |")


async def run(base: Path, adapters: dict[str, Path], rounds: int, weight_dtype: str) -> None:
    """Starts the engines and measures them."""
    common: dict[str, Any] = {"max_model_len": 1024, "kv_blocks": 512, "max_running": 32, "prefix_cache": False}
    common |= {"weight_dtype": weight_dtype}
    async with AsyncLLM(base, **common) as without, AsyncLLM(base, adapters=adapters, **common) as beside:
        engines: dict[str, tuple[AsyncLLM, Sequence[str]]] = {
            "no adapters loaded": (without, [""]),
            "8 loaded, none used": (beside, [""]),
            "one of rank 16": (beside, ["rank 16, 2"]),
            "8 of ranks 4 to 64": (beside, list(adapters)),
        }
        await measure(engines, rounds)


@click.command()
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--weight-dtype", type=click.Choice(["auto", "int8", "int4"]), default="auto", show_default=True)
@click.option("--case", type=click.Choice(["speed", "gap"]), default="speed", show_default=True)
def main(hidden: int, layers: int, rounds: int, weight_dtype: str, case: str) -> None:
    """Print a table in Markdown: milliseconds, and the speed as a share of that without adapters, or the gaps' p50, p99
    and longest."""
    cpu, sizes = read_cpu(), model_sizes(hidden, layers) | {"max_position_embeddings": 1024}
    click.echo(f"{cpu.model}, {', '.join(cpu.instruction_sets)}; bf16, weights {weight_dtype}, hidden {hidden}, ")
    heads = "| | | ms | speed |" if case == "speed" else "| gaps between tokens, ms | p50 | p99 | longest |"
    click.echo(f"{layers} layers\n\n{heads}\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        base = train(Path(folder, "base"), sizes, 1)
        adapters = {}
        for number, rank in enumerate(RANKS if case == "speed" else (64, 64)):
            lora = {"model": {"init": str(base)}, "lora": {"rank": rank}}
            adapters[f"rank {rank}, {number}"] = train(Path(folder, f"adapter-{number}"), sizes, 1, **lora)
        if case == "speed":
            asyncio.run(run(base, adapters, rounds, weight_dtype))
        else:
            asyncio.run(run_gap(base, list(adapters.values()), rounds, weight_dtype))


if __name__ == "__main__":
    main()
