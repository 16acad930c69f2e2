"""One rank's model in training: its modules over flat buckets, gradients exchanged, AdamW on what this rank owns.

`Trainer` drives it through a pipeline schedule; `initialize` hands it to a user's own loop. Both tell it where passes
begin and end; everything between is hooks.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch

from ..core.tensors import Table
from ..parallel.mesh import Mesh
from .config import OptimizerSection, PrecisionSection
from .loss_scale import LossScale
from .zero.flat_buffers import Fill, FlatBuffers
from .zero.gradient_exchange import GradientExchange
from .zero.parameter_gather import ParameterGather, Unit
from .zero.sharded_adamw import ShardedAdamW

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class Engine:
    """Buffers, exchange and optimizer of one rank.

    Args:
        modules: one per stage of this rank.
        sequence_parallel, overlap: see GradientExchange.
        fill: gives every parameter its first values.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        table: Table,
        mesh: Mesh,
        *,
        optimizer: OptimizerSection,
        precision: PrecisionSection,
        device: torch.device,
        fill: Fill,
        sequence_parallel: bool = False,
        overlap: bool = True,
    ) -> None:
        self.mesh = mesh
        self.table = table
        self.device = device
        dtype = DTYPES[precision.params]
        self.buffers = FlatBuffers(tuple(modules), table, mesh, dtype=dtype, device=device, fill=fill)
        self.exchange = GradientExchange(self.buffers, sequence_parallel=sequence_parallel, overlap=overlap)
        self.optimizer = ShardedAdamW(self.buffers, optimizer)
        self.loss_scale = LossScale.of(precision)
        self.gathers: list[ParameterGather] = []

    def gather_around(self, units: Sequence[Sequence[Unit]], *, prefetch: bool, chain: bool = True) -> None:
        """At ZeRO stage 3: the units of each stage, in forward order (see ParameterGather)."""
        self.gathers = [ParameterGather(self.buffers, stage, prefetch=prefetch, chain=chain) for stage in units]
        self.exchange.on_complete = [gather.bucket_done for gather in self.gathers]

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
        """One optimizer step with the gradients clipped to `optimizer.grad_clip`."""
        limit = self.optimizer.options.grad_clip
        clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
        self.optimizer.step(lr, clip / self.loss_scale.value)
