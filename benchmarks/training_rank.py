"""One rank of tk in bench_training.py: `python -m tk.benchmarks.training_rank TP PP DP ZERO COMPILE RANK`.

With `on-request` as one more argument, it runs a step for every line that it reads (compare_checkouts.py).
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tk.core.config import parse
from tk.core.process import keep_freed_memory
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

ROWS, LENGTH = 8, 512
MODEL = json.loads(Path(__file__).with_name("training_model.json").read_text(encoding="utf-8"))


def build(tp: int, pp: int, dp: int, zero: int, compiled: int, rank: int) -> Trainer:
    """Returns this rank's trainer, in a process group of the whole layout."""
    world_size = tp * pp * dp
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['TK_BENCH_STORE']}", rank=rank, world_size=world_size
    )
    micro_batch_size = ROWS // dp if pp == 1 else ROWS // dp // 4
    config = parse(
        {
            "model": MODEL,
            "data": {"cache": ".build/bench/stdlib"},
            "train": {
                "global_batch_size": ROWS,
                "micro_batch_size": micro_batch_size,
                "seq_len": LENGTH,
                "compile": bool(compiled),
            },
            "precision": {"params": os.environ.get("TK_BENCH_PRECISION", "bf16")},
            "parallel": {"tp": tp, "pp": pp, "dp": dp, "schedule": "1f1b"},
            "zero": {"stage": zero},
            "checkpoint": {"dir": str(Path(os.environ["TK_BENCH_RUN"]))},
        },
        TrainConfig,
        "the benchmark",
    )
    return Trainer(config, Mesh.build(config.layout(world_size), 4))


def timed_step(trainer: Trainer) -> float:
    """Runs one step, which all ranks begin and end together, and returns its seconds."""
    dist.barrier()
    start = time.perf_counter()
    trainer.step()
    dist.barrier()
    return time.perf_counter() - start


def main(*numbers: int) -> None:
    """Runs two steps to warm up and six that count; rank 0 prints the median."""
    trainer = build(*numbers)
    seconds = [timed_step(trainer) for _ in range(8)][2:]
    median = sorted(seconds)[3]
    tp, pp, dp, zero, _, rank = numbers
    if rank == 0:
        print(f"tk tp {tp} pp {pp} dp {dp} ZeRO-{zero}: {median:.3f} s/step {ROWS * LENGTH / median:.0f} tok/s")
    dist.destroy_process_group()


def on_request(*numbers: int) -> None:
    """Runs one step for every line of standard input, and prints its seconds."""
    trainer = build(*numbers)
    for _ in sys.stdin:
        print(timed_step(trainer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    run = on_request if "on-request" in arguments else main
    run(*(int(argument) for argument in arguments if argument != "on-request"))
