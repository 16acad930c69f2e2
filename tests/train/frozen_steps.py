"""Steps of a small Llama of `transformers` with frozen parts: by torch alone, and by an engine on every rank."""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tk.train.foreign.model_engine import ModelEngine

OPTIMIZER: Final = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
STEPS, ROWS = 3, 4


def small_llama() -> LlamaForCausalLM:
    """Returns a model of three layers, with the same values every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=False, **sizes))


def batch(step: int) -> torch.Tensor:
    """Returns the tokens of a step, [ROWS, 9]."""
    return torch.randint(0, 50, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def steps_of_torch(model: nn.Module) -> list[float]:
    """Trains what learns in a model with torch's AdamW; returns the losses."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def steps_of_engine(engine: ModelEngine, each: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Trains on this rank's rows up to step STEPS; calls `each` after every step.

    Returns:
        "losses": the mean over the ranks, by step; "held": the bytes of frozen parameters on this rank, before the
        first step and after each.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    losses, held = list[float](), [resident_bytes(engine.module)]
    for step in range(engine.step_count, STEPS):
        loss = engine({"input_ids": batch(step)[mine], "labels": batch(step)[mine]})
        engine.backward(loss)
        engine.step()
        total = loss.detach() / world
        dist.all_reduce(total)
        losses.append(float(total))
        held.append(resident_bytes(engine.module))
        each()
    return {"losses": losses, "held": held}


def resident_bytes(model: nn.Module) -> int:
    """Returns the bytes behind a model's frozen parameters."""
    with torch._C.DisableTorchFunctionSubclass():  # else it is an error to ask for the memory of an absent one
        frozen = [parameter.untyped_storage() for parameter in model.parameters() if not parameter.requires_grad]
    return sum({storage.data_ptr(): storage.nbytes() for storage in frozen}.values())
