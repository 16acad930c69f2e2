"""One rank of tk in bench_axes.py: `python -m tk.benchmarks.axes_rank SETTINGS RANK`.

SETTINGS is JSON: the sections of a configuration that differ from the defaults. For every line of standard input it
runs a step, and prints its seconds.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tk.core.config import parse
from tk.core.process import keep_freed_memory
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

WORLD_SIZE = 2


def build(settings: dict[str, dict[str, Any]], rank: int) -> Trainer:
    """Returns this rank's trainer, in a process group of both ranks."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['TK_BENCH_STORE']}", rank=rank, world_size=WORLD_SIZE
    )
    common = {
        "data": {"cache": ".build/bench/stdlib"},
        "checkpoint": {"dir": str(Path(os.environ["TK_BENCH_RUN"]))},
    }
    config = parse(common | settings, TrainConfig, "the benchmark")
    return Trainer(config, Mesh.build(config.layout(WORLD_SIZE), config.model.num_key_value_heads or 1))


def main(settings: str, rank: str) -> None:
    """Runs one step for every line of standard input, which all ranks begin and end together."""
    trainer = build(json.loads(settings), int(rank))
    for _ in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        trainer.step()
        dist.barrier()
        print(time.perf_counter() - start, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
