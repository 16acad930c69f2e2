"""The end of a step, for `Trainer` and `initialize` alike: gradients exchanged, sums agreed on, checked, the update."""

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
    """Sums over all ranks, the same bits on each.

    Attributes:
        others: of the further values that `OptimizerStep.agree` was given.
    """

    loss: float
    grad_norm: float
    others: tuple[float, ...]


class OptimizerStep:
    """Ends the steps of one rank.

    Args:
        options: for steps that are not finite.
        before_update: called before parameters and states change, to end what still reads them.
        on_phase: called with the name of what the rank begins.
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
        """Waits for the exchange of gradients, and adds up over all ranks; every rank calls it after its last backward.

        Args:
            loss: this rank's share of the step's loss.
            others: scalars to be added up beside it.
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
            step: 1-based, for errors.
            local_loss: this rank's own, to say whose is not finite.

        Returns:
            Whether they were updated.

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
