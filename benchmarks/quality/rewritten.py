"""Copies of a Llama that compute the same function from other numbers: outliers in keys, or channels permuted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
WEIGHTS: Final = "model.safetensors"
NUM_PAIRS: Final = 2  # of a kv head
FACTOR: Final = 8  # a power of two: bf16 holds the products exactly
INPUTS: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "embed_tokens",
    "lm_head",
)  # read hidden channels
OUTPUTS: Final = ("o_proj", "down_proj")  # write hidden channels


def with_outliers(source: Path, target: Path) -> Path:
    """Writes a copy in which keys have outliers: in each kv head two pairs of K times 8, the same pairs of Q by 8.

    A pair is what the rotary embedding turns together, so every score is as before. The pairs are drawn per layer and
    kv head, with seed 0.

    Args:
        source: a Hugging Face folder of a Llama in one file, in bf16.
        target: the folder to write, which is returned; one that exists is taken as it is.
    """
    return _rewritten(source, target, _scale_pairs)


def permuted(source: Path, target: Path) -> Path:
    """Writes a copy with its hidden channels permuted, and the intermediate ones of each layer, with seed 0.

    Groups of quantized weights then hold other channels than in `source`, as matters if those are quantized already.

    Args:
        source, target: as for `with_outliers`.
    """
    return _rewritten(source, target, _permute)


def _rewritten(source: Path, target: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source.resolve(), partial, ignore=shutil.ignore_patterns(WEIGHTS))
        tensors = load_file(source / WEIGHTS)
        change(tensors, json.loads((source / "config.json").read_text()))
        save_file({name: each.contiguous() for name, each in tensors.items()}, partial / WEIGHTS, {"format": "pt"})
        partial.rename(target)
    return target


def _scale_pairs(tensors: Tensors, config: dict[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    random = np.random.default_rng(0)
    for layer in range(config["num_hidden_layers"]):
        projections = f"model.layers.{layer}.self_attn."
        factors = torch.ones(kv_heads, 2, size // 2)
        for head in range(kv_heads):
            factors[head, :, random.choice(size // 2, NUM_PAIRS, replace=False)] = FACTOR
        tensors[f"{projections}k_proj.weight"] *= factors.view(-1, 1).bfloat16()
        of_queries = factors.repeat_interleave(heads // kv_heads, 0)
        tensors[f"{projections}q_proj.weight"] *= (1 / of_queries).view(-1, 1).bfloat16()


def _permute(tensors: Tensors, config: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    hidden = torch.from_numpy(random.permutation(config["hidden_size"]))
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if kind in INPUTS:
            tensors[name] = tensor[:, hidden]
        elif kind in OUTPUTS or kind.endswith("norm"):
            tensors[name] = tensor[hidden]
    for layer in range(config["num_hidden_layers"]):
        between = torch.from_numpy(random.permutation(config["intermediate_size"]))
        mlp = f"model.layers.{layer}.mlp."
        for name in ("gate_proj", "up_proj"):
            tensors[f"{mlp}{name}.weight"] = tensors[f"{mlp}{name}.weight"][between]
        tensors[f"{mlp}down_proj.weight"] = tensors[f"{mlp}down_proj.weight"][:, between]
