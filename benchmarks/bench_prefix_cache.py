"""The time of the first token after a prompt that the prefix cache holds, beside that after a new prompt."""

import statistics
import time
from pathlib import Path

import click
import numpy as np

from tk.benchmarks.random_model import random_model
from tk.infer import LLM, SamplingParams


def first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    """Returns the seconds from a request to its first token."""
    start = time.perf_counter()
    for _ in llm.stream(prompt, SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)):
        return time.perf_counter() - start
    raise AssertionError("a stream without a delta")


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A checkpoint; default: 135 M random parameters.")
@click.option("--length", default=1000, help="Tokens of a prompt.")
@click.option("--runs", default=5, help="Prompts, of which each is computed once and found once.")
@click.option("--threads", default=2, help="Threads of the worker.")
@click.option("--kv-dtype", default="auto", help="Of the KV cache.")
def main(model: Path | None, length: int, runs: int, threads: int, kv_dtype: str) -> None:
    """Print the median times of the first token in milliseconds: cold, with a hit, and their ratio."""
    path = model or random_model(Path(".build/bench/llama-135m"))
    with LLM(path, threads=threads, kv_dtype=kv_dtype, max_model_len=length + 32) as llm:
        prompts = np.random.default_rng(1).integers(3, llm.model_info().vocab_size, (runs + 1, length)).tolist()
        first_token_seconds(llm, prompts.pop())
        pairs = [(first_token_seconds(llm, prompt), first_token_seconds(llm, prompt)) for prompt in prompts]
    cold, hit = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
    click.echo(f"{length} tokens: cold {cold:.1f} ms, with a hit {hit:.1f} ms: {hit / cold:.1%}")


if __name__ == "__main__":
    main()
