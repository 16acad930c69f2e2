"""The parameters and gradients of one rank in flat buckets, and the range of each bucket that the rank updates.

N ranks share one copy of the optimizer state. The ZeRO stage decides how much of a bucket each of them stores:

    stage   parameters                               gradients (fp32)
    0, 1    all                                      all
    2       all                                      1/N; all only while a backward pass fills the bucket
    3       1/N, as fp32 masters or, if these are    1/N; all only while a backward pass fills the bucket
            offloaded, in the model's dtype;
            all only while their layer computes
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...core.buckets import Bucket, Shard, buckets, shards
from ...core.dtypes import by_code
from ...core.local_params import LocalParam, local_params
from ...core.tensors import Table
from ...parallel.mesh import ALONE, Group, Mesh
from ...parallel.torch_dtypes import torch_dtype
from .absent import Presence
from .gradient_sum import SLOT, GradientSum, ResidentSum, StoredSum
from .own_parameters import SLOT as OWN_SLOT
from .own_parameters import OwnParameters, ResidentParameters, StoredParameters
from .square_sum import square_sum
from .states.open_states import StatePlaces, open_states
from .states.pinned_copies import PinnedCopies
from .states.state_store import StateStore
from .trained_parameter import set_autograd_grad
from .written_values import take_written

Fill = Callable[[LocalParam, torch.Tensor], None]  # writes a parameter's initial values, padding included


@dataclass(slots=True, eq=False)
class FlatBucket:
    """The buffers of one bucket.

    Attributes:
        plan: the parameters of the bucket and their offsets.
        params: all parameters, in the model's dtype [size]; the module's parameters are views of it. At stage 3 its
            memory is allocated only while the parameters are gathered.
        own_range: the elements of the bucket that this rank updates, 1/N of it.
        own: the parameters in `own_range` [size / N]: a view of `params` below stage 3, a copy at stage 3.
        holds_masters: whether `own` are the fp32 masters; else these are in slot "master" of the states.
        shard: the ranks over which the bucket is sharded.
        replicate: the ranks that update the same range.
        ends: the ranks that hold copies of a tied bucket on other stages; else this rank alone.
        sum: the reduced gradients in `own_range`, fp32 [size / N].
        grads: the sum of this rank's gradients, fp32 [size]; None between backward passes from stage 2 on, and if
            gradients are offloaded.
        in_place: whether autograd accumulates directly into `grads`; it can if parameters are fp32 and `grads` stays.
        parameters: the module's parameters, in the plan's order.
        presence: at stage 3, gives the parameters their values and takes them away.
    """

    plan: Bucket
    params: torch.Tensor
    own_range: slice
    own: OwnParameters
    sum: GradientSum
    grads: torch.Tensor | None
    in_place: bool
    holds_masters: bool
    shard: Group
    replicate: Group
    ends: Group
    parameters: tuple[nn.Parameter, ...] = field(default=())
    presence: Presence = field(init=False)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields for each parameter its part of `flat` [size], in the parameter's shape."""
        for local, offset in zip(self.plan.params, self.plan.offsets, strict=True):
            yield flat[offset : offset + local.size].view(local.shape)

    def allocate(self) -> None:
        """Allocates the memory of `params`, with undefined values."""
        self.params.untyped_storage().resize_(self.plan.size * self.params.element_size())

    def attach_params(self) -> None:
        """Makes the module's parameters views of `params`, once its values are gathered."""
        self.presence.restore()

    def take_written(self) -> None:
        """Copies what a user wrote into gathered parameters to `own`, at stage 3."""
        written = self.params[self.own_range]
        if self.holds_masters and self.params.dtype != torch.float32:
            take_written(self.own.read(0, self.own.size), written)
        else:
            self.own.write(0, written)

    def free(self) -> None:
        """Takes the values away from the module's parameters and frees the memory of `params`."""
        self.presence.remove()
        # Only the storage shrinks: tensor objects, and the views that autograd holds, stay the same.
        self.params.untyped_storage().resize_(0)

    def attach_grads(self) -> None:
        """Makes autograd accumulate directly into `grads`, if `in_place`: it adds to a `.grad` that exists."""
        if self.grads is not None and self.in_place:
            for parameter, view in zip(self.parameters, self.views(self.grads), strict=True):
                set_autograd_grad(parameter, view)

    def detach_grads(self) -> None:
        """Keeps autograd from writing into `grads` while a collective reads it."""
        for parameter in self.parameters if self.in_place else ():
            set_autograd_grad(parameter, None)


class FlatBuffers:
    """All buckets of one rank.

    The modules' trainable parameters become views of the buckets; parameters on the meta device get memory this way.

    Args:
        modules: one module per pipeline stage of this rank.
        table: lists the modules' tensors with their slots. Frozen ones stay outside the buckets and whole on every
            rank.
        dtype: the parameters' dtype.
        places: where model states are.
        fill: writes a parameter's initial values; called once for each parameter, in no promised order.

    Attributes:
        shards: the runs of logical boxes that this rank updates.
        frozen: the parameters and buffers outside the buckets.
        copies: makes the copies between the device and the host.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        table: Table,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        places: StatePlaces,
        fill: Fill,
    ) -> None:
        self.mesh = mesh
        self.modules = modules
        self.table = table
        self.dtype = dtype
        self.device = places.device
        self.copies = PinnedCopies()
        layout, rank = mesh.layout, mesh.layout.rank(mesh.coordinates)
        self.zero = layout.zero
        self._holds_masters = dtype == torch.float32 or (layout.zero == 3 and places.offload.optimizer == "none")
        params = local_params(table, layout, rank)
        plans = buckets(params, layout)
        self.shards: tuple[Shard, ...] = shards(plans, layout, rank)
        self._owners = _owners(modules)
        self._gradients = self._open_gradients(plans, places)
        self._parameters = self._open_parameters(plans, places)
        self.buckets = tuple(self._bucket(index, plan, fill) for index, plan in enumerate(plans))
        self.frozen = tuple(local for local in params if not local.trainable)
        self._materialize(fill)

    def _open_gradients(self, plans: Sequence[Bucket], places: StatePlaces) -> StateStore | None:
        """Returns the store of gradients that are offloaded, whole buckets below stage 2; None if none are."""
        tier = places.offload.gradients
        sizes = [plan.size if self.zero < 2 else self._own_size(plan) for plan in plans]
        return None if tier == "none" else open_states(tier, [{SLOT: torch.float32}] * len(sizes), sizes, places)

    def _open_parameters(self, plans: Sequence[Bucket], places: StatePlaces) -> StateStore | None:
        """Returns the store of parameters that are offloaded; None if none are."""
        sizes = [self._own_size(plan) for plan in plans]
        tier = places.offload.parameters
        return None if tier == "none" else open_states(tier, [{OWN_SLOT: self.dtype}] * len(sizes), sizes, places)

    def _own_size(self, plan: Bucket) -> int:
        """Returns the number of elements of a bucket that this rank updates."""
        return plan.size // self.mesh.sharers(plan.family)[0].size

    def _bucket(self, index: int, plan: Bucket, fill: Fill) -> FlatBucket:
        shard, replicate = self.mesh.sharers(plan.family)
        size, length = plan.size, plan.size // shard.size
        own = slice(shard.rank * length, (shard.rank + 1) * length)
        params = torch.zeros(size, dtype=self.dtype, device=self.device)
        whole = self.zero < 2 and self._gradients is None
        grads = torch.zeros(size, dtype=torch.float32, device=self.device) if whole else None
        summed: GradientSum
        if self._gradients is not None:
            held = own if self.zero < 2 else slice(0, length)
            summed = StoredSum(self._gradients, index, held, self.device, self.copies)
        else:
            summed = ResidentSum(torch.zeros(length, device=self.device) if grads is None else grads[own])
        in_place = grads is not None and self.dtype == torch.float32
        bucket = FlatBucket(
            plan,
            params,
            own,
            ResidentParameters(params[own], self.copies),
            summed,
            grads,
            in_place,
            self._holds_masters,
            shard,
            replicate,
            self.mesh.embedding_group if plan.tied else ALONE,
        )
        bucket.parameters = tuple(
            self._adopt(local, place) for local, place in zip(plan.params, bucket.views(params), strict=True)
        )
        with torch.no_grad():
            for local, parameter in zip(plan.params, bucket.parameters, strict=True):
                fill(local, parameter.data)
        if self.zero == 3:
            bucket.own = self._own_copy(index, params[own])
            names = [local.name for local in plan.params]
            bucket.presence = Presence(bucket.parameters, names, tuple(bucket.views(params)))
            bucket.free()
        bucket.attach_grads()
        return bucket

    def _own_copy(self, index: int, values: torch.Tensor) -> OwnParameters:
        """Returns this rank's part of a bucket at stage 3, apart from the bucket."""
        if self._parameters is None:
            held = values.to(torch.float32 if self._holds_masters else self.dtype, copy=True)
            return ResidentParameters(held, self.copies)
        own = StoredParameters(self._parameters, index, values.numel())
        own.write(0, values)
        return own

    def _materialize(self, fill: Fill) -> None:
        """Gives memory and values to frozen parameters that are still on the meta device."""
        for local in self.frozen:
            if self.frozen_tensor(local).is_meta:
                dtype = torch_dtype(by_code(local.pieces[0].tensor.dtype))
                parameter = self._adopt(local, torch.zeros(local.shape, dtype=dtype, device=self.device))
                parameter.requires_grad_(False)
                with torch.no_grad():
                    fill(local, parameter.data)

    def frozen_tensor(self, local: LocalParam) -> torch.Tensor:
        """Returns the module's tensor of an entry of `frozen`: a parameter, or a buffer with its current values."""
        owner, _, name = local.name.rpartition(".")
        tensor: torch.Tensor = getattr(self.modules[local.stage].get_submodule(owner), name)
        return tensor

    def _adopt(self, local: LocalParam, place: torch.Tensor) -> nn.Parameter:
        """Moves a parameter into `place` and returns it.

        A parameter that has memory stays the same object, since modules also keep parameters outside their registry
        (the flat weights of an LSTM). A parameter on the meta device is replaced in every module that registers it.
        """
        old = self.modules[local.stage].get_parameter(local.name)
        if not old.is_meta:
            old.data = place
            return old
        # `data` gives the parameter a version counter of its own, so autograd takes a gather for no in-place change.
        parameter = nn.Parameter(place.data)
        for module, name in self._owners[old]:
            module.register_parameter(name, parameter)
        return parameter

    @property
    def gradients_offloaded(self) -> bool:
        """Whether sums of gradients are in a store."""
        return self._gradients is not None

    def unsharded_params(self) -> Iterator[tuple[LocalParam, torch.Tensor]]:
        """Yields the parameters that this rank always stores whole: frozen ones, and below stage 3 all others."""
        for bucket in self.buckets if self.zero < 3 else ():
            yield from zip(bucket.plan.params, bucket.views(bucket.params), strict=True)
        for local in self.frozen:
            yield local, self.frozen_tensor(local)

    def zero_grads(self) -> None:
        """Sets the gradients to zero, at the beginning of a step."""
        for bucket in self.buckets:
            if bucket.grads is None:
                bucket.sum.clear()
            else:
                bucket.grads.zero_()

    def own_runs(self) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yields each run of a logical box that this rank updates, with its reduced gradients, fp32 1-D, to be read."""
        for shard in self.shards:
            end = shard.start + shard.flat[1] - shard.flat[0]
            yield shard, self.buckets[shard.bucket].sum.read(shard.start, end)

    def own_parameter_runs(self) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yields each run of a logical box that this rank updates, with its parameters, 1-D, to be read."""
        for shard in self.shards:
            end = shard.start + shard.flat[1] - shard.flat[0]
            yield shard, self.buckets[shard.bucket].own.read(shard.start, end)

    def owned_grad_square_sum(self) -> torch.Tensor:
        """Returns this rank's share of the squared gradient norm, an fp64 scalar; their sum over all ranks is the norm.

        A rank counts the elements that it owns. Those ranks that update the same elements count an equal share each.
        """
        totals: dict[int, torch.Tensor] = {}  # by the number of ranks that update the same elements
        for shard, grads in self.own_runs():
            if shard.piece.owner:
                copies = self.buckets[shard.bucket].replicate.size
                zero = torch.zeros((), dtype=torch.float64, device=self.device)
                totals[copies] = totals.get(copies, zero) + square_sum(grads).to(self.device)
        shares = [total / copies for copies, total in totals.items()]
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=self.device)


def _owners(modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Returns for each parameter the modules that register it, with its name there; a tied one has several."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                owners.setdefault(parameter, []).append((owner, name))
    return owners
