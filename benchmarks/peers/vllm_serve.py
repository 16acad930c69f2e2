"""vLLM's CPU build for bench_serving.py, in its own environment: FOLDER THREADS MAX_MODEL_LEN DTYPE.

Weights, products and cache have the dtype: float32 where the CPU has no AVX-512, because torch's products in bf16 are
slow there.
"""

import os
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

from tk.benchmarks.peers.serve_loop import Run, serve
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload, speeds

VOCAB = 30000  # prompts are of ids below it


def environment(threads: int) -> dict[str, str]:
    """Returns the environment variables of vLLM in a process of its own."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's steps are called from here
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def load(folder: str, threads: int, max_model_len: int, dtype: str) -> Run:
    """Loads a model; returns the function that runs a workload."""
    os.environ |= environment(threads)
    vllm: Any = import_module("vllm")
    options = {"dtype": dtype, "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 64}
    engine = vllm.LLM(model=folder, max_model_len=max_model_len, **options).llm_engine
    random = np.random.default_rng()

    def run(workload: SpeedWorkload) -> Speeds:
        count = workload.new_tokens
        params = vllm.SamplingParams(
            max_tokens=count, min_tokens=count, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = random.integers(10, VOCAB, (workload.batch, workload.prompt_tokens)).tolist()
        arrivals: dict[str, list[float]] = {}
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{start}-{i}", {"prompt_token_ids": prompt}, params)
            arrivals[f"{start}-{i}"] = []
        while engine.has_unfinished_requests():
            outputs, now = engine.step(), time.perf_counter()
            for output in outputs:
                times = arrivals[output.request_id]
                times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
        return speeds(workload, start, list(arrivals.values()))

    for batch in (1, 8):
        run(SpeedWorkload(batch, 64, 8))
    return run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
