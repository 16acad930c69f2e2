"""One rank of bench_training_memory.py: it trains and prints the most bytes that were resident in its process."""

import json
import os
import sys
from pathlib import Path

import torch

from tk.core.config import parse
from tk.train.config.train_config import TrainConfig
from tk.train.launch.worker import run_rank


def peak_bytes() -> int:
    """Returns the most bytes that were resident since this process began its program."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run_rank(parse(json.loads(sys.argv[1]), TrainConfig, "the benchmark"), "never")
    print(peak_bytes())
