"""One rank of bench_training_memory.py: `python -m tk.benchmarks.training_memory_rank TINY CONFIG`, both as JSON.

It trains a tiny model and then CONFIG's, and prints by how many bytes its resident memory has risen at most meanwhile.
What Python, torch and communication take without a model is thereby left out.
"""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tk.core.config import parse
from tk.core.process import keep_freed_memory, return_large_blocks
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer


def read_bytes(name: str) -> int:
    """Returns VmRSS, the resident memory of this process, or VmHWM, the most since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def train(text: str, world_size: int, keep: bool) -> None:
    """Trains as `tk train` does, with its last save and evaluation; freed memory that is to `keep` is kept for good."""
    config = parse(json.loads(text), TrainConfig, "the benchmark")
    offloads = config.offload.optimizer != "none"
    if keep and offloads:
        return_large_blocks()
    trainer = Trainer(config, Mesh.build(config.layout(world_size), config.model.num_key_value_heads))
    if keep and not offloads:
        keep_freed_memory()
    trainer.fit()


def main(tiny: str, text: str) -> None:
    """Prints the difference in bytes."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    train(tiny, world_size, keep=False)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = read_bytes("VmRSS")
    train(text, world_size, keep=True)
    print(read_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
