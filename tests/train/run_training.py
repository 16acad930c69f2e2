"""A training run on one rank of the pool, or in the test's process: losses, gradient norms, first gradients."""

from typing import Any

import numpy as np
import torch

from tk.core.config import parse
from tk.parallel.mesh import Mesh
from tk.parity.gradients import compare_gradients, first_gradients
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer
from tk.train.state.progress import StepResult


def run_training(config: dict[str, Any], resume: str = "auto", gradients: str = "") -> dict[str, Any]:
    """Trains on this rank; returns losses and gradient norms by step.

    Args:
        gradients: file of the first gradients; a process alone writes it, ranks return how far theirs are from it.
    """
    parsed = parse(config, TrainConfig, "test")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    model = parsed.model
    mesh = Mesh.build(parsed.layout(world), model.num_key_value_heads, model.tie_word_embeddings)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "balance_loss": [], "z_loss": []}

    def on_step(step: int, result: StepResult) -> None:
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)
        found["balance_loss"].append(result.balance_loss)
        found["z_loss"].append(result.z_loss)
        held = (trainer.engine.buffers, trainer.spec.table)
        if step == 1 and gradients and world is None:
            np.save(gradients, first_gradients(*held))
        elif step == 1 and gradients:
            found.update(compare_gradients(*held, np.load(gradients)))

    trainer = Trainer(parsed, mesh, resume=resume, on_step=on_step)
    trainer.fit()
    return found


def make_trainer(config: dict[str, Any], **arguments: Any) -> Trainer:
    """Returns the trainer of this rank, or of the test's process."""
    parsed = parse(config, TrainConfig, "test")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    mesh = Mesh.build(parsed.layout(world), parsed.model.num_key_value_heads)
    return Trainer(parsed, mesh, **arguments)
