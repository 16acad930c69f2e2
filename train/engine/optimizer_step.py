"""The end of a step, in `Trainer` and `initialize`: the gradients' exchange, sums over ranks, the check, the update."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...parallel.collectives import all_reduce
from ..config.sections import TrainSection
from .nonfinite import NonFinitePolicy
from .training_engine import TrainingEngine


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over all ranks, with the same bits on each rank.

    Attributes:
        loss: the step's loss.
        grad_norm: the norm of the whole gradient.
        others: the sums of the other values that `OptimizerStep.agree` received.
    """

    loss: float
    grad_norm: float
    others: tuple[float, ...]


class OptimizerStep:
    """Ends the steps of one rank.

    Args:
        engine: the rank's engine.
        options: the options for steps that are not finite.
        before_update: called before parameters and states change; it ends all work that still reads them.
        on_phase: called with the name of each phase that begins.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        options: TrainSection,
        *,
        before_update: Callable[[], None],
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.engine = engine
        self.nonfinite = NonFinitePolicy(options, engine)
        self.before_update = before_update
        self.on_phase = on_phase

    def agree(self, loss: torch.Tensor | float, *others: torch.Tensor | float) -> StepSums:
        """Waits for the exchange of gradients and returns sums over all ranks.

        Every rank calls it after its last backward pass of the step.

        Args:
            loss: this rank's share of the step's loss.
            others: other scalars to sum.
        """
        self.on_phase("reduce")
        shares = (loss, self.engine.finish_backward(), *others)
        values = torch.zeros(len(shares), dtype=torch.float64, device=self.engine.device)
        for place, share in enumerate(shares):
            values[place] = share
        total, square_sum, *rest = all_reduce(values, self.engine.mesh.world).tolist()
        return StepSums(total, math.sqrt(square_sum) if square_sum >= 0 else math.nan, tuple(rest))

    def update(self, step: int, sums: StepSums, local_loss: torch.Tensor, lr: float) -> bool:
        """Updates parameters and states, unless loss or gradient overflowed or are not finite; every rank calls it.

        Args:
            step: the step's number, counted from 1, for errors.
            sums: the sums of `agree`.
            local_loss: this rank's share of the loss, so that an error can name ranks; a scalar.
            lr: the learning rate.

        Returns:
            Whether parameters and states were updated.

        Raises:
            TkError: the loss or the gradient norm is not finite, and `options` or the number of such steps in a row
                ends the run.
        """
        if not self.nonfinite.allows(step, sums.loss, sums.grad_norm, local_loss):
            return False
        self.on_phase("optimizer")
        self.before_update()
        self.engine.update(lr, sums.grad_norm)
        return True
