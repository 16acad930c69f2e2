"""DeepSpeed's universal checkpoint for bench_checkpoint.py; it needs deepspeed, and not tk.

`make FOLDER BYTES RANKS` saves a ZeRO-3 checkpoint of about BYTES of fp32 weights and Adam states from RANKS
processes. `convert FOLDER TARGET` converts it by DeepSpeed's own tool into the universal format, and prints the costs
as JSON.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

TAG = "step"
ROWS, COLUMNS = 2816, 1024  # the shape of every tensor


def make(folder: str, num_bytes: str, ranks: str) -> None:
    """Starts the ranks and waits for them."""
    command = [sys.executable, __file__, "save", folder, num_bytes]
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(int(ranks))
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(1)


def save(folder: str, num_bytes: str) -> None:
    """Runs one rank: a step of Adam on plain matrices, then a checkpoint."""
    import torch

    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    count = max(round(int(num_bytes) / (12 * ROWS * COLUMNS)), 1)
    torch.manual_seed(0)

    class Matrices(torch.nn.Module):
        """A module of matrices."""

        def __init__(self) -> None:
            super().__init__()
            self.matrices = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Returns a loss that depends on every parameter."""
            return sum((matrix(x).square().mean() for matrix in self.matrices), torch.zeros(()))

    options = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    }
    model = Matrices()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    engine.backward(engine(torch.randn(1, COLUMNS)))
    engine.step()
    engine.save_checkpoint(folder, tag=TAG)


def convert(folder: str, target: str) -> None:
    """Runs ds_to_universal with two workers per phase, and prints its costs."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", f"{folder}/{TAG}", "--output_folder", target]
    subprocess.run([*command, "--num_extract_workers", "2", "--num_merge_workers", "2"], check=True)
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"peak_mib": peak / 2**10, "read": int(io["rchar"]), "written": int(io["wchar"])}))


COMMANDS: dict[str, Callable[..., None]] = {"make": make, "save": save, "convert": convert}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
