"""The prefill and decode speed of the engine at several batch sizes, beside llama.cpp on the same model and threads.

llama.cpp runs in an environment of its own, made on first use (peers/environments.py; its build takes some minutes);
--no-llamacpp leaves it out.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
import numpy as np

from tk.benchmarks.peers.environments import peer_environment, python_if_possible
from tk.benchmarks.random_model import VOCAB_SIZE, random_model
from tk.core.cpu import read_cpu
from tk.infer import LLM, SamplingParams

KINDS: Final = ("prefill", "decode")
Speeds = dict[str, float]  # tokens per second, by KINDS
Measure = Callable[[int], Speeds]  # of a batch size


def engine_speeds(llm: LLM, batch: int, prompt_tokens: int, new_tokens: int) -> Speeds:
    """Returns the speed of the engine over all sequences of a batch; decoding is a whole run less its prefill."""
    random = np.random.default_rng()

    def seconds(num_new: int) -> float:
        prompts = random.integers(3, VOCAB_SIZE, (batch, prompt_tokens)).tolist()
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True))
        return time.perf_counter() - start

    first, whole = seconds(1), seconds(new_tokens)
    return {"prefill": batch * prompt_tokens / first, "decode": batch * (new_tokens - 1) / (whole - first)}


def llamacpp_speeds(python: Path, model: Path, batch: int, prompt_tokens: int, new_tokens: int, threads: int) -> Speeds:
    """Returns the speed of llama.cpp in a process of its own, with weights and keys in the widths of the engine's."""
    counts = map(str, (batch, prompt_tokens, new_tokens, threads))
    command = [str(python), "-m", "tk.benchmarks.peers.llamacpp_serve", str(model), f"{model}.gguf", *counts]
    run = subprocess.run(command, env=peer_environment(), capture_output=True, text=True, check=True)
    speeds: Speeds = json.loads(run.stdout.splitlines()[-1])
    return speeds


def show(batch: int, measures: dict[str, Measure], runs: int) -> None:
    """Prints the medians of several runs in turn, and the ratio to each peer."""
    found: dict[str, list[Speeds]] = {name: [] for name in measures}
    for _ in range(runs):
        for name, measure in measures.items():
            found[name].append(measure(batch))
    for kind in KINDS:
        medians = {name: statistics.median(each[kind] for each in speeds) for name, speeds in found.items()}
        own, *peers = medians.items()
        ratios = "".join(f"   {name} {speed:.0f} (x {own[1] / speed:.2f})" for name, speed in peers)
        print(f"batch {batch:>3} {kind:<8} {own[0]} {own[1]:.0f} tokens/s{ratios}", flush=True)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A Llama in bf16 to run instead: a Hugging Face folder.")
@click.option("--tp", type=int, default=1, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True, help="Threads per rank.")
@click.option("--kv-dtype", default="auto", show_default=True)
@click.option("--prompt-tokens", type=int, default=128, show_default=True)
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--runs", type=int, default=5, show_default=True, help="Runs of each, in turn; medians are printed.")
@click.option("--no-llamacpp", is_flag=True, help="Leave llama.cpp out.")
def main(
    model: Path | None,
    tp: int,
    threads: int,
    kv_dtype: str,
    prompt_tokens: int,
    new_tokens: int,
    batches: tuple[int, ...],
    runs: int,
    no_llamacpp: bool,
) -> None:
    """Print the tokens per second of prefill and of decoding, over all sequences of a batch."""
    path = model or random_model(Path(".build/bench/llama-135m"))
    cpu = read_cpu()
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets) or 'no instruction set that kernels are written for'}")
    python = None if no_llamacpp else python_if_possible("llamacpp")
    start = time.perf_counter()
    with LLM(path, tp=tp, threads=threads, kv_dtype=kv_dtype, max_model_len=prompt_tokens + new_tokens) as llm:
        info = llm.model_info()
        ready = time.perf_counter() - start
        print(
            f"ready after {ready:.1f} s; tp={tp}, {threads} threads, kernels {info.kernels}, kv dtype {info.kv_dtype}"
        )
        measures: dict[str, Measure] = {"tk": lambda batch: engine_speeds(llm, batch, prompt_tokens, new_tokens)}
        if python is not None:
            measures["llama.cpp"] = lambda batch: llamacpp_speeds(
                python, path, batch, prompt_tokens, new_tokens, tp * threads
            )
        for name, measure in measures.items():  # warm-up; llama.cpp's file is written
            print(f"{name}: {measure(1)['decode']:.0f} tokens/s at first", flush=True)
        for batch in batches:
            show(batch, measures, runs)


if __name__ == "__main__":
    main()
