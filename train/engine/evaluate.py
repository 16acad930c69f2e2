"""Loss on the held-out split, over the same layout as training."""

from typing import TYPE_CHECKING

import torch

from ...data.batches import global_batch
from ...parallel.collectives import all_reduce

if TYPE_CHECKING:
    from ..trainer import Trainer


def evaluate(trainer: "Trainer") -> float:
    """Mean loss, nats per token, over the first `train.eval_rows` rows of the held-out split."""
    options, mesh = trainer.config.train, trainer.mesh
    rows = min(options.eval_rows, trainer.inputs.held_out.num_rows)
    batch = global_batch(
        trainer.inputs.held_out, 0, rows, mesh.coordinates.dp, mesh.layout.dp, options.micro_batch_size
    )
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    sums[0] = trainer.pipeline.evaluate(batch)
    sums[1] = sum(micro.num_valid for micro in batch)
    if not trainer.speaks:
        sums.zero_()
    loss, count = all_reduce(sums, mesh.world).tolist()
    return float(loss / max(1, count))
