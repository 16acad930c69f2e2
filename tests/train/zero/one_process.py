"""The oracle of this folder: a module trained by torch's own AdamW in one process, on the rows of all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 0.5}

Loss = Callable[[nn.Module], torch.Tensor]


def train_alone(module: nn.Module, steps: Sequence[Sequence[Loss]]) -> dict[str, list[float]]:
    """Trains a module and returns its gradient norms and final weights.

    Args:
        module: the module, which is changed.
        steps: for each optimizer step the losses of all ranks' micro-batches; their mean is the step's loss.
    """
    decayed = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    norms = []
    for losses in steps:
        optimizer.zero_grad(
            set_to_none=False
        )  # an unused parameter has a gradient of zero, so that it decays like the others
        torch.stack([loss(module) for loss in losses]).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
    return {"norms": norms} | weights(module)


def weights(module: nn.Module) -> dict[str, list[float]]:
    """Returns every parameter's values, flat."""
    return {name: value.detach().flatten().tolist() for name, value in module.named_parameters()}
