"""The gaps between tokens of four streams, without loads and while adapters of rank 64 are loaded again and again.

Both are measured in turn, in one engine of two threads, so that a change of the machine's speed meets each. The base is
that of `bench_lora_serving.py`; the adapters, of all linear layers, get one name in turn.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import click

from tk.benchmarks.bench_lora import model_sizes
from tk.benchmarks.bench_lora_serving import VOCAB, train
from tk.benchmarks.peers.environments import BUILD
from tk.core.cpu import read_cpu
from tk.infer import AsyncLLM, SamplingParams

GAPS: Final = 150  # of a stream in a round
PAUSE: Final = 0.05  # seconds between two loads
RANK: Final = 64


async def token_gaps(llm: AsyncLLM) -> list[float]:
    """Returns the seconds between the tokens of four streams without adapters."""

    async def gaps() -> list[float]:
        params = SamplingParams(temperature=0.0, max_new_tokens=GAPS + 1, min_new_tokens=GAPS + 1)
        times = [time.perf_counter() async for _ in llm.stream(list(range(1, 17)), params)]
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


async def measure(base: Path, adapters: Sequence[Path], rounds: int) -> None:
    """Prints the rows of the table."""
    quiet, beside, loads = list[float](), list[float](), list[float]()
    async with AsyncLLM(base, max_adapters=1, max_model_len=1024, kv_blocks=512, prefix_cache=False) as llm:
        await token_gaps_beside(llm, adapters, [])
        for _ in range(rounds):
            quiet += await token_gaps(llm)
            beside += await token_gaps_beside(llm, adapters, loads)
    each = f"{len(loads)} loads of {1e3 * statistics.median(loads):.0f} ms"
    for name, found in (("without loads", sorted(quiet)), (f"beside {each}", sorted(beside))):
        half, most = found[len(found) // 2], found[int(len(found) * 0.99)]
        click.echo(f"| {name} | {1e3 * half:.1f} | {1e3 * most:.1f} | {1e3 * found[-1]:.1f} |")


@click.command()
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--rounds", default=6, show_default=True)
def main(hidden: int, layers: int, rounds: int) -> None:
    """Print a table in Markdown: the p50, the p99 and the longest of the gaps, in milliseconds."""
    cpu, folder = read_cpu(), BUILD / "bench" / "lora-gaps" / f"hidden-{hidden}-{layers}-layers"
    base = train(folder / "base", model_sizes(hidden, layers) | {"vocab_size": VOCAB, "max_position_embeddings": 1024})
    lora = {"rank": RANK}
    adapters = [train(folder / f"adapter-{number}", {"init": str(base)}, lora=lora) for number in range(2)]
    click.echo(f"{cpu.model}, {', '.join(cpu.instruction_sets)}; bf16, hidden {hidden}, {layers} layers\n")
    click.echo("| gaps between tokens, ms | p50 | p99 | longest |\n|---|---|---|---|")
    asyncio.run(measure(base, adapters, rounds))


if __name__ == "__main__":
    main()
