"""The prefill and decode speed of the engine at several batch sizes, on random weights and random prompts."""

import time
from pathlib import Path

import click
import numpy as np

from tk.benchmarks.random_model import VOCAB_SIZE, random_model
from tk.infer import LLM, SamplingParams


def seconds(llm: LLM, prompts: list[list[int]], num_new: int) -> float:
    """Returns the seconds that `num_new` greedy tokens for each prompt take, with all prompts in one batch."""
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True))
    return time.perf_counter() - start


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path), help="CKPT to run instead, with a vocabulary of 32,000 or more."
)
@click.option("--tp", type=int, default=1, show_default=True)
@click.option("--kv-dtype", default="auto", show_default=True)
@click.option("--prompt-tokens", type=int, default=128, show_default=True)
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32), show_default=True)
def main(
    model: Path | None, tp: int, kv_dtype: str, prompt_tokens: int, new_tokens: int, batches: tuple[int, ...]
) -> None:
    """Print the tokens per second of prefill and of decoding, over all sequences of a batch."""
    random = np.random.default_rng(0)
    path = model or random_model(Path(".build/bench/llama-135m"))
    start = time.perf_counter()
    with LLM(path, tp=tp, kv_dtype=kv_dtype) as llm:
        print(f"ready after {time.perf_counter() - start:.1f} s; tp={tp}, kv dtype {llm.model_info().kv_dtype}")
        seconds(llm, random.integers(3, VOCAB_SIZE, (1, prompt_tokens)).tolist(), 2)  # warm-up
        print(f"{'batch':>6} {'prefill tok/s':>14} {'decode tok/s':>13}")
        for batch in batches:
            prompts = random.integers(3, VOCAB_SIZE, (2, batch, prompt_tokens)).tolist()
            first = seconds(llm, prompts[0], 1)
            whole = seconds(llm, prompts[1], new_tokens)
            prefill, decode = batch * prompt_tokens / first, batch * (new_tokens - 1) / (whole - first)
            print(f"{batch:>6} {prefill:>14.0f} {decode:>13.0f}", flush=True)


if __name__ == "__main__":
    main()
