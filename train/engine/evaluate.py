"""The loss on held-out rows, computed at the layout of training."""

from collections.abc import Sequence

import torch

from ...data.batches import MicroBatch
from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from .passes import Passes


def evaluate(passes: Passes, batch: Sequence[MicroBatch], mesh: Mesh) -> float:
    """Returns the mean loss in nats per token, the same on every rank; every rank calls it.

    Args:
        passes: the rank's passes.
        batch: this data-parallel rank's micro-batches.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=passes.engine.device)
    sums[0] = passes.evaluate(batch)
    sums[1] = sum(micro.num_valid for micro in batch)
    if not passes.is_loss_rank:
        sums.zero_()
    loss, count = all_reduce(sums, mesh.world).tolist()
    return float(loss / max(1, count))
