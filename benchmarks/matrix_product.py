"""The rate of plain bf16 matrix products, as tokens/s of training_rank.py's model: the upper bound of a step."""

import time

import torch

from tk.benchmarks.training_rank import LENGTH, MODEL, ROWS
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.train.planning.flops import flops_per_token

SIZE, COUNT, ROUNDS = 4096, 3, 5


def main() -> None:
    """Multiplies the rows of a step by a large square matrix on all threads; prints the rate of the best round."""
    one, two = torch.randn(ROWS * LENGTH, SIZE).bfloat16(), torch.randn(SIZE, SIZE).bfloat16()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(COUNT):
            one @ two
        seconds.append((time.perf_counter() - start) / COUNT)
    rate = 2 * ROWS * LENGTH * SIZE * SIZE / min(seconds)
    tokens = rate / flops_per_token(decoder_spec(ModelConfig.model_validate(MODEL)), LENGTH)
    print(f"matrix products: {rate / 1e9:.0f} GFLOP/s {tokens:.0f} tok/s")


if __name__ == "__main__":
    main()
