"""One rank's model in training: its modules over flat buckets, gradients exchanged, AdamW on what this rank owns.

`Trainer` drives it through a pipeline schedule; `initialize` hands it to a user's own loop. Both tell it where passes
begin and end; everything between is hooks.
"""

from collections.abc import Sequence

import torch

from ..core.layout import Table
from ..parallel.mesh import Mesh
from .config import TrainConfig
from .loss_scale import LossScale
from .zero.flat_buffers import Fill, FlatBuffers
from .zero.gradient_exchange import GradientExchange
from .zero.parameter_gather import ParameterGather, Unit
from .zero.sharded_adamw import ShardedAdamW


class Engine:
    """Buffers, exchange and optimizer of one rank.

    Args:
        modules: one per stage of this rank.
        config: sections precision, parallel, zero and optimizer.
        fill: gives every parameter its first values.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        table: Table,
        mesh: Mesh,
        config: TrainConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fill: Fill,
    ) -> None:
        self.mesh = mesh
        self.table = table
        self.device = device
        self.buffers = FlatBuffers(tuple(modules), table, mesh, dtype=dtype, device=device, fill=fill)
        self.exchange = GradientExchange(
            self.buffers, sequence_parallel=config.parallel.sequence_parallel, overlap=config.zero.overlap
        )
        self.optimizer = ShardedAdamW(self.buffers, config.optimizer)
        self.loss_scale = LossScale.of(config.precision)
        self.grad_clip = config.optimizer.grad_clip
        self.gathers: list[ParameterGather] = []

    def gather_around(self, units: Sequence[Sequence[Unit]], *, prefetch: bool) -> None:
        """At ZeRO stage 3: the units of each stage, in forward order."""
        self.gathers = [ParameterGather(self.buffers, stage, prefetch=prefetch) for stage in units]

    def begin_step(self) -> None:
        """Forgets the gradients of the step before."""
        self.buffers.zero_grads()

    def begin_backward(self, stage: int, *, last: bool, complete: bool = True) -> None:
        """A backward pass of this rank's `stage` begins: the last one of the step, and one that gives all gradients of
        its micro-batch rather than putting some off."""
        if self.gathers:
            self.gathers[stage].begin_backward()
        if complete:
            self.exchange.begin_backward(last)

    def end_pass(self, stage: int) -> None:
        """A forward or backward pass of `stage` has ended."""
        if self.gathers:
            self.gathers[stage].end_pass()

    def gradients_arrived(self, stage: int, *, last: bool) -> None:
        """All gradients of one micro-batch have arrived, of the step's last if `last`."""
        self.exchange.end_backward(stage, last)

    def finish_backward(self) -> torch.Tensor:
        """Waits for every exchange. Returns this rank's share of the squared gradient norm, fp64 scalar, unscaled: its
        sum over the world is the whole."""
        self.exchange.finish()
        square_sum = self.buffers.owned_grad_square_sum() / self.mesh.replicate.size
        return square_sum / self.loss_scale.value**2

    def update(self, lr: float, grad_norm: float) -> None:
        """One optimizer step with the gradients clipped to `grad_clip`."""
        clip = min(1.0, self.grad_clip / (grad_norm + 1e-6)) if self.grad_clip else 1.0
        self.optimizer.step(lr, clip / self.loss_scale.value)
