"""vLLM's CPU build with adapters for bench_lora_serving.py, in its own environment: FOLDER THREADS ROUNDS ADAPTER...

Prints a line of JSON per step that is measured: its name, and the seconds without adapters, with the third on all rows,
and with all mixed, in turn. With one thread, they are seconds of the process on a core.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import median
from typing import Any, Final

from tk.benchmarks.peers.vllm_serve import environment

CACHED: Final = 32  # tokens before those that are decoded
STEPS: Final = 6  # of decoding in a round

Measure = Callable[[int, Sequence[int], int, int], list[float]]


def load(folder: str, threads: int, paths: Sequence[str]) -> Measure:
    """Loads a model and adapters; returns the function that computes a batch and returns the seconds of its steps."""
    os.environ |= environment(threads)
    vllm, request = (import_module(name) for name in ("vllm", "vllm.lora.request"))
    adapters = [request.LoRARequest(path, number, path) for number, path in enumerate(paths, 1)]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": len(paths), "max_lora_rank": 64}
    options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 32, "dtype": "bfloat16"}
    engine = vllm.LLM(model=folder, max_model_len=1024, **options).llm_engine
    clock = time.process_time if threads == 1 else time.perf_counter

    def measure(batch: int, used: Sequence[int], tokens: int, new: int) -> list[float]:
        params = vllm.SamplingParams(max_tokens=new, min_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        for i in range(batch):
            adapter = adapters[used[i % len(used)]] if used else None
            prompt = {"prompt_token_ids": [1 + (7 * i + j) % 4000 for j in range(tokens)]}
            engine.add_request(f"{start}-{i}", prompt, params, lora_request=adapter)
        seconds = []
        while engine.has_unfinished_requests():
            start_of_step = clock()
            engine.step()
            seconds.append(clock() - start_of_step)
        return seconds

    return measure


def main(folder: str, threads: int, rounds: int, paths: Sequence[str]) -> None:
    """Measures decoding at several sizes of a batch, and prefill; libraries' prints go to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        measure = load(folder, threads, paths)
        ways: tuple[Sequence[int], ...] = ((), (2,), range(len(paths)))
        for batch, tokens in ((1, CACHED), (8, CACHED), (32, CACHED), (8, 64)):
            decodes = tokens == CACHED
            found: list[list[float]] = [[] for _ in ways]
            for number in range(rounds + 1):
                for used, seconds in zip(ways, found, strict=True):
                    steps = measure(batch, used, tokens, STEPS + 1 if decodes else 1)
                    if number:
                        seconds.append(median(steps[-STEPS:]) if decodes else sum(steps))
            name = f"decode, batch {batch}" if decodes else f"prefill, {batch} x {tokens} tokens"
            print(json.dumps([name, *found]), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
