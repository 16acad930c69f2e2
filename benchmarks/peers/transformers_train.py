"""Training by `transformers` in one process: `-m tk.benchmarks.peers.transformers_train eager|compile`, autocast."""

import os
import sys

import torch
from torch import nn

from tk.benchmarks.peers.workload import make_model, make_optimizer, make_rows, tokens_per_second


def main(mode: str) -> None:
    """Trains the model and prints the speed."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = make_model()
    forward = torch.compile(model) if mode == "compile" else model
    optimizer, rows = make_optimizer(model), make_rows(1)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    print(f"transformers {mode}: {tokens_per_second(step)}")


if __name__ == "__main__":
    main(sys.argv[1])
