"""The model and the clock of the contenders of bench_gpu.py, and the figures that they report."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CUDA: Final = torch.device("cuda")
VOCAB_SIZE: Final = 16384
LENGTH: Final = 4096
SHAPE: Final = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
}


def figure(name: str, value: str) -> None:
    """Prints a figure, and adds it to those of `make gpu-check`, if that runs this process."""
    print(f"{name}: {value}", flush=True)
    if path := os.environ.get("TK_FIGURES"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, value]) + "\n")


def seconds(run: Callable[[], object], warm_up: int = 2, counted: int = 6) -> float:
    """Returns the median time of a call, with the GPU's work."""
    found = []
    for _ in range(warm_up + counted):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[warm_up:])


def transformers_model() -> "LlamaForCausalLM":
    """Returns the same model of transformers, with fp32 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with CUDA:
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **SHAPE))


def stored_model() -> Path:
    """Writes the model in bf16, and returns its folder."""
    folder = Path(os.environ["TK_BENCH_RUN"]).with_name("hf")
    if not (folder / "config.json").exists():
        transformers_model().bfloat16().save_pretrained(folder)
        torch.cuda.empty_cache()
    return folder
