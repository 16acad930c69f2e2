"""The speed of the engine beside its peers, beside the machine's limits and beside itself, with the promises about it.

Every section runs its contestants in turn, prints medians, and ends with its promises. llama.cpp, OpenVINO GenAI and
vLLM run in environments of their own, made on first use (peers/environments.py; llama.cpp's build takes some minutes).
"""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import click

from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.random_model import large_model, random_model
from tk.benchmarks.serving import beside_peers, cache_formats, limits, own_ratios, prefix_hit, structured, weights
from tk.benchmarks.serving.in_turn import Promise
from tk.benchmarks.serving.setup import ENVIRONMENTS, QUANTIZED, Setup, running_peers
from tk.core.cpu import read_cpu

Section = Callable[[Setup], list[Promise]]
SECTIONS: Final[Mapping[str, Section]] = MappingProxyType(
    {
        "prefill": beside_peers.prefill,
        "decode": beside_peers.decode,
        "long": beside_peers.long,
        "weights": weights.weights,
        "read": limits.read,
        "kv": cache_formats.kv,
        "long-kv": cache_formats.long_kv,
        "tp": own_ratios.ranks,
        "sampling": own_ratios.sampling,
        "structured": structured.structured,
        "speculate": own_ratios.proposals,
        "prefix": prefix_hit.prefix,
        "start": limits.start,
    }
)
LARGE: Final = "1b"  # names the model of `large_model`
WITH_PEERS: Final = ("prefill", "decode", "long")
WITH_QUANTIZED_PEERS: Final = ("weights",)


def listed(known: Mapping[str, object], _: click.Context, option: click.Parameter, value: str) -> list[str]:
    """Parses names separated by commas, of which some are known."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}.", param=option)
    return names


def run_sections(names: Sequence[str], setup: Setup) -> list[Promise]:
    """Runs sections, and shows the promises of each."""
    promises: list[Promise] = []
    for name in names:
        setup.show(f"\n== {name}")
        found = SECTIONS[name](setup)
        for promise in found:
            setup.show(promise.line())
        promises += found
    return promises


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help=f"A Llama in bf16 to run instead: a Hugging Face folder, or {LARGE}: a random one of 1.1 B parameters.",
)
@click.option(
    "--only", default=",".join(SECTIONS), show_default=True, callback=partial(listed, SECTIONS), help="Sections to run."
)
@click.option(
    "--peers",
    default=",".join(ENVIRONMENTS),
    show_default=True,
    callback=partial(listed, ENVIRONMENTS),
    help='Peers to run; "": none.',
)
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of each contestant.")
@click.option("--prompt-tokens", type=int, default=128, show_default=True)
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--runs", type=int, default=5, show_default=True, help="Runs of each, in turn; medians are printed.")
def main(
    model: Path | None,
    only: list[str],
    peers: list[str],
    threads: int,
    prompt_tokens: int,
    new_tokens: int,
    batches: tuple[int, ...],
    runs: int,
) -> None:
    """Print tokens per second over all sequences of a batch, and the promises that hold or are missed."""
    cpu = read_cpu()
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets) or 'no instruction set that kernels are written for'}")
    path = model or random_model(BUILD / "bench" / "llama-135m")
    path = large_model(BUILD / "bench") if path == Path(LARGE) else path
    show = partial(print, flush=True)
    show(f"{path}: {threads} threads, medians of {runs}")
    setup = Setup(path, model is None, threads, runs, batches, prompt_tokens, new_tokens, show)
    promises: list[Promise] = []
    quantized = [name for group in QUANTIZED.values() for name in group if name.startswith(tuple(peers))]
    for sections, needed in ((WITH_PEERS, peers), (WITH_QUANTIZED_PEERS, quantized)):
        beside = [name for name in only if name in sections]
        with running_peers(needed if beside else (), path, threads, cpu, show) as started:
            promises += run_sections(beside, replace(setup, peers=started))
    alone = [name for name in only if name not in (*WITH_PEERS, *WITH_QUANTIZED_PEERS)]
    promises += run_sections(alone, setup)
    missed = [promise for promise in promises if not promise.is_kept]
    show(f"\n{len(promises) - len(missed)} of {len(promises)} promises are kept" + (", missed:" if missed else ""))
    for promise in missed:
        show(promise.line())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # peers end, too
    main()
