"""Parameters and gradients of a rank in flat buckets, the ranges of them that this rank updates, and their exchange.

ZeRO (arXiv 1910.02054) on plain buffers: at stage 0 the group that shares one optimizer state has one member, so
reducing is an all-reduce over replicas; at stage 1 it is a reduce-scatter, and an all-gather after the update.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..core.layout import Bucket, Shard, Table, buckets, local_params, shards
from ..parallel.collectives import all_gather_flat, all_reduce, reduce_scatter_flat
from ..parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """One bucket's buffers.

    Attributes:
        plan: which parameters lie where.
        params: the model's dtype [size]; the module's parameters are views of it.
        grads: fp32 [size], summed over micro-batches, then over ranks.
        own_params: this rank's range of `params`.
        own_grads: fp32, this rank's range of the reduced gradients.
    """

    plan: Bucket
    params: torch.Tensor
    grads: torch.Tensor
    own_params: torch.Tensor
    own_grads: torch.Tensor


class FlatBuffers:
    """All buckets of one rank, made from a module whose parameters it moves into them."""

    def __init__(self, module: nn.Module, table: Table, mesh: Mesh) -> None:
        self.mesh = mesh
        at, layout = mesh.coordinates, mesh.layout
        plans = buckets(local_params(table, layout, at.pp, at.tp), layout)
        self.shards: tuple[Shard, ...] = shards(plans, mesh.shard.size, mesh.shard.rank)
        self.buckets = tuple(self._adopt(module, plan) for plan in plans)

    def _adopt(self, module: nn.Module, plan: Bucket) -> FlatBucket:
        parameters = [module.get_parameter(local.name) for local in plan.params]
        flat = torch.zeros(plan.size, dtype=parameters[0].dtype, device=parameters[0].device)
        grads = torch.zeros(plan.size, dtype=torch.float32, device=flat.device)
        for parameter, local, offset in zip(parameters, plan.params, plan.offsets, strict=True):
            place = flat[offset : offset + local.size].view(local.shape)
            place.copy_(parameter.data)
            parameter.data = place
            _accumulate_into(parameter, grads[offset : offset + local.size].view(local.shape))
        length = plan.size // self.mesh.shard.size
        own = slice(self.mesh.shard.rank * length, (self.mesh.shard.rank + 1) * length)
        own_grads = grads if self.mesh.shard.size == 1 else torch.zeros(length, device=flat.device)
        return FlatBucket(plan, flat, grads, flat[own], own_grads)

    def zero_grads(self) -> None:
        """Forgets the gradients of the last step."""
        for bucket in self.buckets:
            bucket.grads.zero_()

    def reduce_grads(self) -> None:
        """Sums gradients over every rank that saw other data or another copy; each rank's range is in `own_grads`."""
        for bucket in self.buckets:
            self._sum_over_tp(bucket)
            reduce_scatter_flat(bucket.own_grads, bucket.grads, self.mesh.shard)
            all_reduce(bucket.own_grads, self.mesh.replicate)

    def _sum_over_tp(self, bucket: FlatBucket) -> None:
        """Adds up what ranks with the same values saw apart: replicated kv heads, norms of heads, routers."""
        for local, offset in zip(bucket.plan.params, bucket.plan.offsets, strict=True):
            for piece in local.pieces:
                group = self.mesh.tp if piece.tensor.partial_grad else self.mesh.kv_heads
                if piece.tensor.partial_grad or piece.num_holders > 1:
                    start = offset + piece.start
                    all_reduce(bucket.grads[start : start + piece.box.size], group)

    def gather_params(self) -> None:
        """Gives every rank of the group the parameters that the others have updated."""
        for bucket in self.buckets:
            all_gather_flat(bucket.params, bucket.own_params, self.mesh.shard)

    def owned_grad_square_sum(self) -> torch.Tensor:
        """Sum of squares, fp64 scalar, of the gradient elements that this rank owns: their sum over one replica of
        the whole mesh is the square of the gradient's norm."""
        norms = [
            torch.linalg.vector_norm(_run(self.buckets[shard.bucket].own_grads, shard))
            for shard in self.shards
            if shard.piece.owner
        ]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.buckets[0].grads.device)
        return torch.stack(norms).double().square().sum()


def _run(buffer: torch.Tensor, shard: Shard) -> torch.Tensor:
    return buffer[shard.start : shard.start + shard.flat[1] - shard.flat[0]]


def _accumulate_into(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    """Makes backward add the parameter's gradient into `grad`, in fp32."""
    if parameter.dtype == torch.float32:
        parameter.grad = grad  # autograd accumulates in place into a gradient that is there
        return

    def add(param: torch.Tensor) -> None:
        if param.grad is not None:
            grad.add_(param.grad)
            param.grad = None

    parameter.register_post_accumulate_grad_hook(add)
