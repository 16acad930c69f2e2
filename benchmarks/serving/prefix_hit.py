"""The section of bench_serving.py about the prefix cache: the first token after a prompt that it holds."""

import statistics
import time
from typing import Final

import numpy as np

from tk.benchmarks.serving.in_turn import Promise
from tk.benchmarks.serving.setup import Setup
from tk.infer import LLM, SamplingParams

HIT_BOUND: Final = 0.05
PROMPT_TOKENS: Final = 1000
BLOCK: Final = 32  # tokens: a prompt's last ones, up to a block, are computed again


def prefix(setup: Setup) -> list[Promise]:
    """Compares the time of the first token after a prompt that was computed before with that after a new one."""
    with LLM(setup.model, threads=setup.threads, max_model_len=PROMPT_TOKENS + BLOCK) as llm:
        size = (setup.runs + 1, PROMPT_TOKENS)
        prompts = np.random.default_rng().integers(3, llm.model_info().vocab_size, size).tolist()
        first_token_seconds(llm, prompts.pop())
        pairs = [(first_token_seconds(llm, prompt), first_token_seconds(llm, prompt)) for prompt in prompts]
    cold, hit = (statistics.median(each) for each in zip(*pairs, strict=True))
    setup.show(f"first token after {PROMPT_TOKENS} tokens: new {1000 * cold:.1f} ms, with a hit {1000 * hit:.1f} ms")
    text = f"first token after a hit of {PROMPT_TOKENS} tokens beside new ones"
    return [Promise(text, hit / cold, HIT_BOUND, most=True)]


def first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    """Returns the seconds from a request to its first token."""
    start = time.perf_counter()
    next(llm.stream(prompt, SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)))
    return time.perf_counter() - start
