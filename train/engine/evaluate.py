"""The loss on held-out rows, computed at the layout of training."""

from collections.abc import Sequence

import torch

from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from .passes import Passes
from .row_packer import PackedRows


def evaluate(passes: Passes, batch: Sequence[PackedRows], mesh: Mesh) -> float:
    """Returns the mean loss in nats per token, the same on every rank; every rank calls it.

    Args:
        passes: the rank's passes.
        batch: this data-parallel rank's micro-batches.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=passes.engine.device)
    loss = passes.evaluate(batch)
    if passes.is_loss_rank:
        sums[0] = loss
    if passes.is_row_rank:
        sums[1] = sum(micro.num_valid for micro in batch)
    total, count = all_reduce(sums, mesh.world).tolist()
    return float(total / max(1, count))
