"""The workload of bench_training.py: the model, the batch and the clock. It needs torch, and no room of tk."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROWS, LENGTH = 8, 512
WARM_UP, COUNTED = 2, 6  # steps
MODEL = json.loads(Path(__file__).parents[1].joinpath("training_model.json").read_text(encoding="utf-8"))


def make_model() -> "LlamaForCausalLM":
    """Makes the model in `transformers`, with random fp32 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **MODEL))


def make_rows(num_ranks: int) -> torch.Tensor:
    """Returns a rank's share of a batch: token ids, int64 [ROWS / num_ranks, LENGTH]."""
    return torch.randint(0, MODEL["vocab_size"], (ROWS // num_ranks, LENGTH))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Makes a fused AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def tokens_per_second(step: Callable[[], object], barrier: Callable[[], object] = lambda: None) -> str:
    """Runs all steps and returns the median time and speed, in the form that bench_training.py parses.

    Args:
        step: runs one step.
        barrier: waits for all ranks, so that they begin and end a step together.
    """
    seconds = []
    for _ in range(WARM_UP + COUNTED):
        barrier()
        start = time.perf_counter()
        step()
        barrier()
        seconds.append(time.perf_counter() - start)
    median = statistics.median_high(seconds[WARM_UP:])
    return f"{median:.3f} s/step {ROWS * LENGTH / median:.0f} tok/s"
