"""What happens to a step whose loss or gradient norm is not finite: decided alike on every rank, before any update."""

import math

import torch

from ...core.errors import TkError
from ...parallel.collectives import all_gather
from ..config.sections import TrainSection
from ..health.stall_detector import name_ranks
from .training_engine import TrainingEngine


class NonFinitePolicy:
    """Counts steps that were left out and says which may update parameters.

    Attributes:
        skipped: steps left out in a row, those of a shrinking loss scale not among them.
    """

    def __init__(self, options: TrainSection, engine: TrainingEngine) -> None:
        self.options = options
        self.engine = engine
        self.skipped = 0

    def allows(self, step: int, loss: float, grad_norm: float, local_loss: torch.Tensor) -> bool:
        """Whether `step` (1-based) may update parameters. All ranks call it with the same loss and norm.

        Args:
            local_loss: this rank's share of the loss, to say whose it was.

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
        ranks = [str(rank) for rank, value in enumerate(losses) if not torch.isfinite(value).all()]
        where = f"The loss of rank {', '.join(ranks)} is not finite" if ranks else "Every rank's own loss is finite"
        parameter, holders = self._first_parameter()
        if parameter:
            where += f"; the first gradient that is not is that of {parameter}, as {name_ranks(holders)} reduced it"
        often = f" {self.skipped} steps in a row were so." if self.skipped > 1 else ""
        return (
            f"Step {step}: loss {loss}, gradient norm {grad_norm}; both must be finite. {where}.{often} Nothing was "
            'updated. Lower the learning rate, look at the batch\'s rows, or set train.on_nonfinite = "skip".'
        )

    def _first_parameter(self) -> tuple[str, list[int]]:
        """The first tensor of the table whose reduced gradient is not finite, and the ranks that own such values of it;
        "" if there is none."""
        buffers, table = self.engine.buffers, self.engine.table
        index = {spec.name: place for place, spec in enumerate(table)}
        bad = [index[shard.piece.tensor.name] for shard, grads in buffers.own_runs() if not torch.isfinite(grads).all()]
        mine = torch.tensor([min(bad, default=len(table))], dtype=torch.int64, device=self.engine.device)
        firsts = [int(first) for first in all_gather(mine, self.engine.mesh.world)]
        place = min(firsts)
        holders = [rank for rank, first in enumerate(firsts) if first == place]
        return (table[place].name, holders) if place < len(table) else ("", [])
