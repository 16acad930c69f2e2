"""AdamW on the ranges of the flat buckets that this rank owns, with fp32 masters of low-precision parameters."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.profiler import record_function

from ...core.buckets import Shard
from ...parallel.collectives import all_gather_flat
from ..config.sections import OptimizerSection
from .adamw_rule import AdamWFactors, AdamWStreams, adamw_rule
from .flat_buffers import FlatBucket, FlatBuffers
from .written_values import take_written


class ShardedAdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101); one update rule for every ZeRO stage.

    Attributes:
        step_count: the number of updates made.
        states: for each slot one fp32 tensor per bucket, of this rank's range. The slots are "exp_avg", "exp_avg_sq",
            and "master" if parameters are not fp32.
    """

    def __init__(self, buffers: FlatBuffers, options: OptimizerSection) -> None:
        self.buffers = buffers
        self.options = options
        self.step_count = 0
        self._rule = adamw_rule(buffers.device)
        # float() copies low-precision parameters and returns fp32 ones themselves, which then are their own masters.
        self._masters = [bucket.own_params.float() for bucket in buffers.buckets]
        self.states = {
            "exp_avg": [torch.zeros_like(master) for master in self._masters],
            "exp_avg_sq": [torch.zeros_like(master) for master in self._masters],
        }
        if buffers.dtype != torch.float32:
            self.states["master"] = self._masters

    def step(self, lr: float, grad_scale: float) -> None:
        """Updates this rank's range of every bucket, then gathers the parameters of the shard group.

        Args:
            lr: the learning rate of this step.
            grad_scale: the factor for gradients, for clipping and the loss scale.
        """
        self.step_count += 1
        options = self.options
        decayed = AdamWFactors(self.step_count, lr, options.betas, options.eps, options.weight_decay, grad_scale)
        with record_function("ShardedAdamW.step"):
            for index, bucket in enumerate(self.buffers.buckets):
                # Parameters with weight decay come first in a bucket; the border may lie in another rank's range.
                boundary = min(max(bucket.plan.num_decay - bucket.own_range.start, 0), bucket.own_grads.numel())
                self._update(index, slice(0, boundary), decayed)
                self._update(index, slice(boundary, None), replace(decayed, weight_decay=0.0))
                self._gather(bucket)

    def _update(self, index: int, part: slice, factors: AdamWFactors) -> None:
        master, bucket = self._masters[index][part], self.buffers.buckets[index]
        if not master.numel():
            return
        exp_avg, exp_avg_sq = (self.states[slot][index][part] for slot in ("exp_avg", "exp_avg_sq"))
        is_rounded = self.buffers.zero < 3 and bucket.own_params is not self._masters[index]
        rounded = bucket.own_params[part] if is_rounded else None
        self._rule(AdamWStreams(master, exp_avg, exp_avg_sq, bucket.own_grads[part], rounded), factors)

    def _gather(self, bucket: FlatBucket) -> None:
        if self.buffers.zero < 3:
            all_gather_flat(bucket.params, bucket.own_params, self.buffers.mesh.shard)

    def publish(self) -> None:
        """Rounds the masters into the parameters and all-gathers these over the shard group.

        At stage 3 it does nothing: the next forward pass rounds and gathers each unit.
        """
        if self.buffers.zero == 3:
            return
        for master, bucket in zip(self._masters, self.buffers.buckets, strict=True):
            if master is not bucket.own_params:
                bucket.own_params.copy_(master)
            self._gather(bucket)

    def take_written_values(self) -> None:
        """Copies values that a user wrote into parameters to the masters; every rank has made the same changes.

        At stage 3 it does nothing: ParameterGather takes them before it frees a unit.
        """
        if self.buffers.zero < 3:
            for master, bucket in zip(self._masters, self.buffers.buckets, strict=True):
                take_written(master, bucket.own_params)

    def runs(self, slot: str) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yields each run of a logical box that this rank updates, with its values of `slot` (1-D fp32 view).

        Slot "master" is the fp32 value of the parameter, also if parameters are fp32 and `states` has no such slot.
        """
        for shard in self.buffers.shards:
            yield shard, self.run(slot, shard)

    def run(self, slot: str, shard: Shard) -> torch.Tensor:
        """Returns the values of `slot` of one of the runs, 1-D fp32 view."""
        tensors = self._masters if slot == "master" else self.states[slot]
        return tensors[shard.bucket][shard.start : shard.start + shard.flat[1] - shard.flat[0]]
