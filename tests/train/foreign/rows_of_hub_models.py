"""Models of `transformers` that ranks train together, and their distance from one process of plain `transformers`."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from tk.train import initialize

Batch = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE: dict[str, Any] = _SIZES | {"intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _WIDE | {"num_key_value_heads": 2}),
    "Llama of one kv head": ("Llama", _WIDE | {"num_key_value_heads": 1}),
    "Mistral": ("Mistral", _WIDE | {"num_key_value_heads": 2, "sliding_window": 5}),
    "Qwen2": ("Qwen2", _WIDE | {
        "num_key_value_heads": 2, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 1,
    }),
    "Mixtral": ("Mixtral", _WIDE | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "GPTNeoX": ("GPTNeoX", _WIDE),
    "GPT2": ("GPT2", _SIZES | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0}),
}  # fmt: skip
OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "grad_clip": 0.5}
STEPS = 3


def make(name: str, **changes: Any) -> Any:
    """Returns a model with random weights."""
    family, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens(number: int, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(number))


def whole_rows(number: int) -> Batch:
    return {"input_ids": tokens(number, 2, 17), "labels": tokens(number, 2, 17)}


def packed(number: int) -> Batch:
    lengths = (3, 1, 11, 8)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens(number, 1, 23), "labels": tokens(number, 1, 23), "position_ids": positions}


def padded(number: int) -> Batch:
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[0, 5:] = 0
    labels = tokens(number, 2, 13).masked_fill(mask == 0, -100)
    return {"input_ids": tokens(number, 2, 13), "labels": labels, "attention_mask": mask}


def few_targets(number: int) -> Batch:
    """Two targets at the begin of a row: most ranks have none."""
    labels = torch.full((1, 16), -100)
    labels[0, 1:3] = tokens(number, 1, 2)
    return {"input_ids": tokens(number, 1, 16), "labels": labels}


def short(number: int) -> Batch:
    """Fewer positions than four ranks."""
    return {"input_ids": tokens(number, 2, 3), "labels": tokens(number, 2, 3)}


BATCHES: dict[str, Callable[[int], Batch]] = {
    "whole rows": whole_rows,
    "packed": packed,
    "padded": padded,
    "few targets": few_targets,
    "short": short,
}


@dataclass
class Measured:
    """The steps of one training.

    Attributes:
        losses: the mean loss of each step.
        gradients: the first step's gradient of each parameter.
        weights: the parameters after all steps.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def in_one_process(model: Any, batches: list[list[Batch]]) -> Measured:
    """Trains with torch on one process, the micro-batches of a step in turn."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    losses, gradients = [], dict[str, torch.Tensor]()
    for of_step in batches:
        optimizer.zero_grad()
        loss = sum((model(**batch, use_cache=False).loss for batch in of_step), torch.zeros(())) / len(of_step)
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Measured(losses, gradients, dict(model.state_dict()))


def over_ranks(model: Any, batches: list[list[Batch]], cp: int, mode: Any, zero: Any, checkpointing: bool) -> Measured:
    """Trains with `initialize`; each of dp groups of ranks takes its micro-batches of a step."""
    if checkpointing:
        model.gradient_checkpointing_enable()
    before = model.config._attn_implementation
    dp, group = dist.get_world_size() // cp, dist.get_rank() // cp
    engine = initialize(
        model, OPTIMIZER, zero=zero, cp=cp, cp_mode=mode, accumulate=len(batches[0]) // dp, bucket_size=1500
    )
    gradients: dict[str, torch.Tensor] = {}
    hooks = [p.register_hook(_adding(gradients, name)) for name, p in model.named_parameters()]
    losses = []
    for number, of_step in enumerate(batches):
        total = torch.zeros(())
        for batch in of_step[group::dp]:
            loss = engine(batch)
            engine.backward(loss)
            total += loss.detach() / len(of_step)
        assert engine.step()
        dist.all_reduce(total)
        losses.append(float(total) / cp)
        for hook in hooks if number == 0 else ():
            hook.remove()
    for name in sorted(gradients):
        dist.all_reduce(gradients[name])
    engine.close()
    assert model.config._attn_implementation == before
    return Measured(losses, gradients, engine.state_dict())


def _adding(gradients: dict[str, torch.Tensor], name: str) -> Callable[[torch.Tensor], None]:
    def add(gradient: torch.Tensor) -> None:
        gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient

    return add


def distances(
    model: str, batch: str, cp: int, mode: str, zero: int, accumulate: int = 1, checkpointing: bool = False
) -> list[float]:
    """Returns the largest relative differences of losses, of gradients and of weights after all steps."""
    dp, make_batch = dist.get_world_size() // cp, BATCHES[batch]
    number = dp * accumulate
    batches = [[make_batch(10 * step + each) for each in range(number)] for step in range(STEPS)]
    first = make(model)
    expected = in_one_process(deepcopy(first), batches)
    found = over_ranks(first, batches, cp, mode, zero, checkpointing)
    assert found.gradients.keys() == expected.gradients.keys()
    losses = max(abs(one - other) / other for one, other in zip(found.losses, expected.losses, strict=True))
    return [losses, _apart(found.gradients, expected.gradients), _apart(found.weights, expected.weights)]


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of a tensor, relative to its norm, or to the mean norm where that is larger."""
    norms = [float(each.norm()) for each in expected.values()]
    mean = sum(norms) / len(norms)
    return max(float((found[name] - each).norm()) / max(float(each.norm()), mean) for name, each in expected.items())
