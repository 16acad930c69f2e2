"""The policy for steps whose loss or gradient norm is not finite: every rank decides the same, before any update."""

import math
from collections.abc import Iterator

import torch

from ...core.buckets import Shard
from ...core.errors import TkError
from ...parallel.collectives import all_gather
from ..config.sections import TrainSection
from ..health.stall_detector import name_ranks
from .training_engine import TrainingEngine


class NonFinitePolicy:
    """Decides which steps may update parameters.

    Args:
        options: the reaction to such steps, and how many in a row may be left out.
        engine: the rank's engine.

    Attributes:
        skipped: the number of steps left out in a row; steps that lowered the loss scale do not count.
    """

    def __init__(self, options: TrainSection, engine: TrainingEngine) -> None:
        self.options = options
        self.engine = engine
        self.skipped = 0

    def allows(self, step: int, loss: float, grad_norm: float, local_loss: torch.Tensor) -> bool:
        """Returns whether a step may update parameters; every rank calls it with the same loss and norm.

        Args:
            step: the step's number, counted from 1.
            loss, grad_norm: the step's loss and gradient norm, over all ranks.
            local_loss: this rank's share of the loss, so that the error can name ranks; a scalar.

        Raises:
            TkError: the run ends; the message says on which ranks and in which parameters numbers are not finite.
        """
        scale = self.engine.loss_scale
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped = 0
            scale.succeeded()
            return True
        if scale.can_shrink:
            scale.overflowed()
            return False
        self.skipped += 1
        if self.options.on_nonfinite == "stop" or self.skipped > self.options.max_skipped_steps:
            raise TkError(self._describe(step, loss, grad_norm, local_loss))
        return False

    def _describe(self, step: int, loss: float, grad_norm: float, local_loss: torch.Tensor) -> str:
        losses = all_gather(local_loss.double().reshape(1), self.engine.mesh.world)
        ranks = [rank for rank, value in enumerate(losses) if not torch.isfinite(value).all()]
        where = f"The loss of {name_ranks(ranks)} is not finite." if ranks else "The loss of every rank is finite."
        weight, holders = self._first_tensor(self.engine.buffers.own_parameter_runs())
        if weight:
            where += f" The weight {weight}, as held on {name_ranks(holders)}, is not finite itself."
            advice = "Begin from finite weights: an earlier step, or other initial ones."
        else:
            where += self._describe_gradient()
            advice = "Lower the learning rate, look at the batch's rows, or, in `tk train`, set "
            advice += 'train.on_nonfinite = "skip".'
        often = f" {self.skipped} steps in a row were not finite." if self.skipped > 1 else ""
        return (
            f"Step {step}: loss {loss}, gradient norm {grad_norm}; both must be finite. {where}{often} Nothing was "
            f"updated. {advice}"
        )

    def _describe_gradient(self) -> str:
        parameter, holders = self._first_tensor(self.engine.buffers.own_runs())
        if not parameter:
            return ""
        return (
            f" The gradient of {parameter}, as reduced on {name_ranks(holders)}, is not finite; it is the first such "
            "gradient of the model."
        )

    def _first_tensor(self, runs: Iterator[tuple[Shard, torch.Tensor]]) -> tuple[str, list[int]]:
        """Returns the first tensor of the table with values that are not finite in the ranks' own `runs`, and the ranks
        that have such values of it; "" if there is none."""
        table = self.engine.table
        index = {spec.name: place for place, spec in enumerate(table)}
        bad = [index[shard.piece.tensor.name] for shard, values in runs if not torch.isfinite(values).all()]
        mine = torch.tensor([min(bad, default=len(table))], dtype=torch.int64, device=self.engine.device)
        firsts = [int(first) for first in all_gather(mine, self.engine.mesh.world)]
        place = min(firsts)
        holders = [rank for rank, first in enumerate(firsts) if first == place]
        return (table[place].name, holders) if place < len(table) else ("", [])
