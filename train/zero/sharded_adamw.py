"""AdamW over the ranges of the flat buckets that this rank owns, with fp32 masters of low-precision parameters."""

from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw

from ...core.layout import Shard
from ...parallel.collectives import all_gather_flat
from ..config.train_config import OptimizerSection
from .flat_buffers import FlatBuffers


class ShardedAdamW:
    """Decoupled weight decay Adam (arXiv 1711.05101); one update rule for every ZeRO stage.

    Attributes:
        step_count: updates made so far.
        states: slot -> one fp32 tensor per bucket: "exp_avg", "exp_avg_sq", and "master" where parameters are not fp32.
    """

    def __init__(self, buffers: FlatBuffers, options: OptimizerSection) -> None:
        self.buffers = buffers
        self.options = options
        self.step_count = 0
        self._masters = [bucket.own_params.float() for bucket in buffers.buckets]  # fp32: the parameters themselves
        self.states = {
            "exp_avg": [torch.zeros_like(master) for master in self._masters],
            "exp_avg_sq": [torch.zeros_like(master) for master in self._masters],
        }
        if buffers.dtype != torch.float32:
            self.states["master"] = self._masters

    def step(self, lr: float, grad_scale: float) -> None:
        """One update of this rank's range, then everybody's parameters.

        Args:
            grad_scale: what gradients are multiplied by first (clipping, loss scale).
        """
        self.step_count += 1
        for index, bucket in enumerate(self.buffers.buckets):
            boundary = min(max(bucket.plan.num_decay - bucket.own.start, 0), bucket.own_grads.numel())
            self._update(index, slice(0, boundary), lr, grad_scale, self.options.weight_decay)
            self._update(index, slice(boundary, None), lr, grad_scale, 0.0)
        self.publish()

    def _update(self, index: int, part: slice, lr: float, grad_scale: float, weight_decay: float) -> None:
        master = self._masters[index][part]
        if not master.numel():
            return
        beta1, beta2 = self.options.betas
        adamw(
            [master],
            [self.buffers.buckets[index].own_grads[part]],
            [self.states["exp_avg"][index][part]],
            [self.states["exp_avg_sq"][index][part]],
            [],
            [torch.tensor(float(self.step_count - 1), device=master.device)],
            fused=True,
            grad_scale=torch.tensor(1.0 / grad_scale, device=master.device),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.options.eps,
            maximize=False,
        )

    def publish(self) -> None:
        """Rounds masters into the parameters and gathers the group's; at stage 3 the next forward does that."""
        if self.buffers.zero == 3:
            return
        for master, bucket in zip(self._masters, self.buffers.buckets, strict=True):
            if master is not bucket.own_params:
                bucket.own_params.copy_(master)
            all_gather_flat(bucket.params, bucket.own_params, self.buffers.mesh.shard)

    def take_over(self) -> None:
        """Masters become what was changed of whole parameters since they were rounded into them. Every rank changed the
        same, and calls it while they are there."""
        for master, bucket in zip(self._masters, self.buffers.buckets, strict=True):
            now = bucket.params[bucket.own]
            if master.data_ptr() != now.data_ptr():
                changed = now != master.to(now.dtype)
                master[changed] = now[changed].float()
        self.publish()

    def runs(self, slot: str) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Every run of a logical box that this rank updates, with its values of `slot` (1-D fp32 view).

        Slot "master" is the fp32 value of the parameter, whether or not it is kept apart from it.
        """
        tensors = self._masters if slot == "master" else self.states[slot]
        for shard in self.buffers.shards:
            yield shard, tensors[shard.bucket][shard.start : shard.start + shard.flat[1] - shard.flat[0]]
