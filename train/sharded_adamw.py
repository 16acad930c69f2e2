"""AdamW over the ranges of the flat buckets that this rank owns, with fp32 masters of low-precision parameters."""

from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw

from ..core.layout import Shard
from .config import OptimizerSection
from .flat_buffers import FlatBuffers


class ShardedAdamW:
    """Decoupled weight decay Adam (arXiv 1711.05101); one update rule for ZeRO 0 and 1.

    Attributes:
        step_count: updates made so far.
        states: slot -> one fp32 tensor per bucket: "exp_avg", "exp_avg_sq", and "master" where parameters are not fp32.
    """

    def __init__(self, buffers: FlatBuffers, options: OptimizerSection) -> None:
        self.buffers = buffers
        self.options = options
        self.step_count = 0
        self._steps = [torch.zeros((), device=bucket.params.device) for bucket in buffers.buckets]
        low_precision = buffers.buckets[0].params.dtype != torch.float32
        self._masters = [
            bucket.own_params.float() if low_precision else bucket.own_params for bucket in buffers.buckets
        ]
        self.states = {
            "exp_avg": [torch.zeros_like(master) for master in self._masters],
            "exp_avg_sq": [torch.zeros_like(master) for master in self._masters],
        }
        if low_precision:
            self.states["master"] = self._masters

    def step(self, lr: float, grad_scale: float) -> None:
        """One update of this rank's range, then everybody's parameters.

        Args:
            grad_scale: what gradients are multiplied by first (clipping).
        """
        self.step_count += 1
        beta1, beta2 = self.options.betas
        for index, bucket in enumerate(self.buffers.buckets):
            adamw(
                [self._masters[index]],
                [bucket.own_grads],
                [self.states["exp_avg"][index]],
                [self.states["exp_avg_sq"][index]],
                [],
                [self._steps[index].fill_(self.step_count - 1)],
                fused=True,
                grad_scale=torch.tensor(1.0 / grad_scale, device=bucket.params.device),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=self.options.weight_decay if bucket.plan.decay else 0.0,
                eps=self.options.eps,
                maximize=False,
            )
        self.publish()

    def publish(self) -> None:
        """Rounds masters into the parameters and gathers the group's."""
        for master, bucket in zip(self._masters, self.buffers.buckets, strict=True):
            if master is not bucket.own_params:
                bucket.own_params.copy_(master)
        self.buffers.gather_params()

    def runs(self, slot: str) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Every run of a logical box that this rank updates, with its values of `slot` (1-D fp32 view).

        Slot "master" is the fp32 value of the parameter, whether or not it is kept apart from it.
        """
        tensors = self._masters if slot == "master" else self.states[slot]
        for shard in self.buffers.shards:
            yield shard, tensors[shard.bucket][shard.start : shard.start + shard.flat[1] - shard.flat[0]]
