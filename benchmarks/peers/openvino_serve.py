"""OpenVINO GenAI's continuous batching for bench_serving.py, in its own environment: FOLDER THREADS bf16|f32 [int8].

FOLDER-openvino is exported if it is missing, or FOLDER-openvino-int8, with weights in int8. bf16 or f32 is the
precision of its products, chosen by what the CPU has. Keys and values are u8, its default.
"""

import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from tk.benchmarks.peers.serve_loop import Run, serve
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload, speeds

genai: Any = import_module("openvino_genai")
openvino: Any = import_module("openvino")

CACHE_GIB: Final = 4
WEIGHTS: Final = "fp16"  # optimum's name of weights that keep 16 bits
VOCAB: Final = 30000  # prompts are of ids below it


def exported(folder: Path, weights: str) -> Path:
    """Returns the folder with the model in OpenVINO's format, which is written if it is missing."""
    target = folder.with_name(f"{folder.name}-openvino" + ("" if weights == WEIGHTS else f"-{weights}"))
    if not target.exists():
        aside = target.with_suffix(".part")
        command = [sys.executable, "-m", "tk.benchmarks.peers.openvino_export", str(folder), str(aside), weights]
        subprocess.run(command, check=True)
        aside.rename(target)
    return target


def load(folder: Path, threads: int, precision: str, weights: str = WEIGHTS) -> Run:
    """Loads a model; returns the function that runs a workload."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = CACHE_GIB, 64, 1024
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    pipeline = genai.ContinuousBatchingPipeline(str(exported(folder, weights)), scheduler, "CPU", hints)
    random = np.random.default_rng()

    def run(workload: SpeedWorkload) -> Speeds:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = workload.new_tokens
        config.ignore_eos, config.do_sample = True, False
        prompts = random.integers(10, VOCAB, (workload.batch, 1, workload.prompt_tokens), np.int64)
        arrivals: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        handles = [pipeline.add_request(i, openvino.Tensor(ids), config) for i, ids in enumerate(prompts)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter()
            for times, handle in zip(arrivals, handles, strict=True):
                while handle.can_read():
                    new = sum(len(output.generated_ids) for output in handle.read().values())
                    times.extend([now] * new)
        return speeds(workload, start, arrivals)

    run(SpeedWorkload(1, 8, 8))
    return run


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
