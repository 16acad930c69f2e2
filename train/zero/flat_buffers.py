"""Parameters and gradients of a rank in flat buckets, and the ranges of them that this rank updates.

What of a bucket a rank keeps, by ZeRO stage (N ranks share one copy of the optimizer state):

    stage   parameters              gradients (fp32)
    0       all                     all
    1       all                     all
    2       all                     1/N; all of them only while a backward pass fills the bucket
    3       1/N (the fp32 masters)  1/N, likewise; all parameters only around the layer that computes
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ...core.layout import Bucket, LocalParam, Shard, buckets, local_params, shards
from ...core.tensors import Table
from ...parallel.mesh import Mesh
from .absent import Presence
from .square_sum import square_sum

Fill = Callable[[LocalParam, torch.Tensor], None]  # writes a parameter's first values, padding included


@dataclass(slots=True, eq=False)
class FlatBucket:
    """One bucket's buffers.

    Attributes:
        plan: which parameters lie where.
        params: the model's dtype [size]; the module's parameters are views of it. At stage 3 its memory comes and goes.
        own: this rank's range.
        own_params: this rank's range of the parameters: of `params` below stage 3, an fp32 copy at stage 3.
        own_grads: fp32, this rank's range of the reduced gradients.
        grads: fp32 [size], what backward has added up on this rank; from stage 2 on None between backward passes.
        in_place: whether autograd may accumulate right into `grads`.
        parameters: in the plan's order.
        presence: at stage 3, of the parameters' values.
    """

    plan: Bucket
    params: torch.Tensor
    own: slice
    own_params: torch.Tensor
    own_grads: torch.Tensor
    grads: torch.Tensor | None
    in_place: bool
    parameters: tuple[nn.Parameter, ...] = field(default=())
    presence: Presence = field(init=False)

    def places(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each parameter's part of `flat` [size], in its shape."""
        for local, offset in zip(self.plan.params, self.plan.offsets, strict=True):
            yield flat[offset : offset + local.size].view(local.shape)

    def allocate(self) -> None:
        """Gives `params` its memory back, to be filled."""
        self.params.untyped_storage().resize_(self.plan.size * self.params.element_size())

    def show(self) -> None:
        """The module's parameters have the values of `params` from now on."""
        self.presence.begin()

    def free(self) -> None:
        """Takes the parameters' values away, and the memory of `params`."""
        self.presence.end()
        self.params.untyped_storage().resize_(0)

    def attach_grads(self) -> None:
        """Has autograd accumulate in place, where it can: into a gradient that is there."""
        if self.grads is not None and self.in_place:
            for parameter, place in zip(self.parameters, self.places(self.grads), strict=True):
                parameter.grad = place

    def detach_grads(self) -> None:
        """Has autograd leave `grads` alone."""
        for parameter in self.parameters if self.in_place else ():
            parameter.grad = None


class FlatBuffers:
    """All buckets of one rank. The module's parameters, wherever they were (the meta device too), become views.

    Args:
        modules: the module of each of this rank's stages.
        table: names the module's parameters; what is not trainable in it stays outside the buckets, on every rank.
        dtype: of the parameters.
        fill: gives every parameter its first values; called once per parameter, in whatever order.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        table: Table,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fill: Fill,
    ) -> None:
        self.mesh = mesh
        self.modules = modules
        self.dtype = dtype
        self.device = device
        at, layout = mesh.coordinates, mesh.layout
        self.zero = layout.zero
        params = local_params(table, layout, at.pp, at.tp)
        plans = buckets(params, layout)
        self.shards: tuple[Shard, ...] = shards(plans, mesh.shard.size, mesh.shard.rank)
        self._users = _users(modules)
        self.buckets = tuple(self._bucket(plan, fill) for plan in plans)
        self.frozen = tuple(local for local in params if not local.trainable)
        self._materialize(fill)

    def _bucket(self, plan: Bucket, fill: Fill) -> FlatBucket:
        size, length = plan.size, plan.size // self.mesh.shard.size
        own = slice(self.mesh.shard.rank * length, (self.mesh.shard.rank + 1) * length)
        params = torch.zeros(size, dtype=self.dtype, device=self.device)
        grads = None if self.zero >= 2 else torch.zeros(size, dtype=torch.float32, device=self.device)
        own_grads = torch.zeros(length, device=self.device) if grads is None else grads[own]
        in_place = grads is not None and self.dtype == torch.float32
        bucket = FlatBucket(plan, params, own, params[own], own_grads, grads, in_place)
        bucket.parameters = tuple(
            self._adopt(local, place) for local, place in zip(plan.params, bucket.places(params), strict=True)
        )
        with torch.no_grad():
            for local, parameter in zip(plan.params, bucket.parameters, strict=True):
                fill(local, parameter.data)
        if self.zero == 3:
            bucket.own_params = params[own].float().clone()
            names = [local.name for local in plan.params]
            bucket.presence = Presence(bucket.parameters, names, tuple(bucket.places(params)))
            bucket.free()
        bucket.attach_grads()
        return bucket

    def _materialize(self, fill: Fill) -> None:
        """Gives frozen parameters memory where they have none yet."""
        for local in self.frozen:
            if self.frozen_tensor(local).is_meta:
                parameter = self._adopt(local, torch.zeros(local.shape, dtype=self.dtype, device=self.device))
                parameter.requires_grad_(False)
                with torch.no_grad():
                    fill(local, parameter.data)

    def frozen_tensor(self, local: LocalParam) -> torch.Tensor:
        """What of the module stays where it is: a parameter, or a buffer as forward last left it."""
        owner, _, name = local.name.rpartition(".")
        tensor: torch.Tensor = getattr(self.modules[local.stage].get_submodule(owner), name)
        return tensor

    def _adopt(self, local: LocalParam, place: torch.Tensor) -> nn.Parameter:
        """The module's parameter with its memory in `place`: the same object if it has any yet, since modules hold
        parameters elsewhere, too (the flat weights of an LSTM)."""
        old = self.modules[local.stage].get_parameter(local.name)
        if not old.is_meta:
            old.data = place
            return old
        parameter = nn.Parameter(place.data)  # `data`: what is gathered into `place` is no change to autograd
        for module, name in self._users[old]:
            module.register_parameter(name, parameter)
        return parameter

    def held_whole(self) -> Iterator[tuple[LocalParam, torch.Tensor]]:
        """The parameters that this rank holds all of at any time: all below stage 3, frozen ones always."""
        for bucket in self.buckets if self.zero < 3 else ():
            yield from zip(bucket.plan.params, bucket.places(bucket.params), strict=True)
        for local in self.frozen:
            yield local, self.frozen_tensor(local)

    def zero_grads(self) -> None:
        """Forgets the gradients of the last step."""
        for bucket in self.buckets:
            (bucket.own_grads if bucket.grads is None else bucket.grads).zero_()

    def own_runs(self) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Every run of a logical box that this rank updates, with its reduced gradients (1-D fp32 view)."""
        for shard in self.shards:
            grads = self.buckets[shard.bucket].own_grads
            yield shard, grads[shard.start : shard.start + shard.flat[1] - shard.flat[0]]

    def owned_grad_square_sum(self) -> torch.Tensor:
        """Sum of squares, fp64 scalar, of the gradient elements that this rank owns: their sum over one replica of
        the whole mesh is the square of the gradient's norm."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard, grads in self.own_runs():
            if shard.piece.owner:
                total += square_sum(grads)
        return total


def _users(modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Where each parameter is registered: tied ones in several places."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                users.setdefault(parameter, []).append((owner, name))
    return users
