"""A foreign module: its training by `initialize`, and the reference that torch's AdamW gives on one process."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..core.tensors import Table
from ..parallel.collectives import all_reduce
from ..train.config.sections import OptimizerSection
from ..train.config.train_config import TrainConfig
from ..train.engine.lr_schedule import learning_rate
from ..train.foreign.blocks import find_blocks
from ..train.foreign.model import ForeignModel
from ..train.foreign.model_engine import initialize
from .flat_values import Values
from .rank_loop import Send
from .reference_values import ReferenceValues
from .subject import MICRO_BATCHES

VOCAB_SIZE: Final = 101
LENGTH: Final = 12


class Reader(nn.Module):
    """A module of torch's layers with a tied head and a frozen position embedding; it returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 32)
        self.positions = nn.Embedding(LENGTH, 32).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 72, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCAB_SIZE)
        self.head.weight = self.embed.weight

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        """Maps tokens and targets, int64 [B, L] each, to the mean loss, a scalar."""
        x_BLD = self.embed(tokens_BL) + self.positions.weight
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return F.cross_entropy(self.head(self.norm(x_BLD)).flatten(0, 1), targets_BL.flatten())


def make_module(seed: int) -> Reader:
    """Builds the module with the same initial values on every rank."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return Reader()


def micro_batch(seed: int, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and next tokens of one micro-batch, int64 [2, LENGTH] each, in a pattern that can be learned."""
    generator = torch.Generator().manual_seed((seed * 1000 + step) * MICRO_BATCHES + number)
    starts_B1 = torch.randint(VOCAB_SIZE, (2, 1), generator=generator)
    walk_BL = (starts_B1 + 7 * torch.arange(LENGTH + 1)) % VOCAB_SIZE
    return walk_BL[:, :-1], walk_BL[:, 1:]


def run_reference(config: TrainConfig, values: ReferenceValues, send: Send) -> dict[str, Any]:
    """Trains with torch alone and writes its values to the files of `values`.

    The files have the order of `flat_values`. Returns the curves by name, one value per step.
    """
    module, options = make_module(config.train.seed), config.optimizer
    table = ForeignModel.of(module, find_blocks(module)).table
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(_groups(learned, options), betas=options.betas, eps=options.eps)
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": [], "routing": []}
    for step in range(config.train.steps):
        optimizer.zero_grad()
        losses = [module(*micro_batch(config.train.seed, step, number)) for number in range(MICRO_BATCHES)]
        loss = torch.stack(losses).mean()
        loss.backward()
        if step == 0:
            np.save(values.gradients, _flat(_gradients(module, table)))
        norm = nn.utils.clip_grad_norm_(learned, options.grad_clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, options)
        optimizer.step()
        if step + 1 == values.num_updates:
            np.save(values.weights, _flat(_weights(module, table)))
        _record(curves, step, float(loss.detach()), float(norm), send)
    return curves


def _groups(learned: list[nn.Parameter], options: OptimizerSection) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in learned if (p.dim() >= 2) == decay], "weight_decay": options.weight_decay * decay}
        for decay in (True, False)
    ]


def _weights(module: nn.Module, table: Table) -> list[nn.Parameter]:
    return [module.get_parameter(spec.name) for spec in table if spec.trainable and not spec.alias]


def _gradients(module: nn.Module, table: Table) -> list[torch.Tensor]:
    return [weight.grad for weight in _weights(module, table) if weight.grad is not None]


def _flat(tensors: Sequence[torch.Tensor]) -> Values:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()


def _record(curves: dict[str, list[float]], step: int, loss: float, norm: float, send: Send) -> None:
    for name, value in (("loss", loss), ("grad_norm", norm), ("routing", 0.0)):
        curves[name].append(value)
    send({"step": step + 1})


def run_layout(config: TrainConfig, values: ReferenceValues, send: Send) -> dict[str, Any]:
    """Trains as a rank of the current process group, and compares its values with the files of `values`.

    Raises:
        TkError: replicas that must be bit-equal differ.
    """
    dp, zero = config.layout(None).dp, config.zero
    engine = initialize(
        make_module(config.train.seed),
        config.optimizer,
        zero=zero.stage,
        accumulate=MICRO_BATCHES // dp,
        steps=config.train.steps,
        shard_size=zero.shard_size,
        bucket_size=zero.bucket_size,
        offload=config.offload.model_dump(),
        timeout_seconds=config.parallel.timeout_seconds,
    )
    inner = engine._engine  # the public engine does not show gradients
    world = inner.mesh.world
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": [], "routing": []}
    found: dict[str, Any] = {}
    with closing(inner.optimizer):
        for step in range(config.train.steps):
            share = torch.zeros((), dtype=torch.float64)
            for number in range(world.rank, MICRO_BATCHES, dp):
                loss = engine(micro_batch(config.train.seed, step, number))
                engine.backward(loss)
                share += loss.detach() / MICRO_BATCHES
            engine.step()
            found |= values.compare(step + 1, inner)
            _record(curves, step, float(all_reduce(share, world)), engine.last_grad_norm, send)
        engine._checkpointer.replicas.check(config.train.steps)
    return curves | found
