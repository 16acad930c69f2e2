"""The parameters and gradients of one rank in flat buckets, and the range of each bucket that the rank updates.

N ranks share one copy of the optimizer state. The ZeRO stage decides how much of a bucket each of them stores:

    stage   parameters                               gradients (fp32)
    0, 1    all                                      all
    2       all                                      1/N; all only while a backward pass fills the bucket
    3       1/N, as fp32 masters or, if these are    1/N; all only while a backward pass fills the bucket
            offloaded, in the model's dtype;
            all only while their layer computes

Frozen parameters are in buckets of their own at stage 3, without gradients and in the model's dtype; below it every
rank holds them whole.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ...core.buckets import Bucket, Shard, buckets, frozen_buckets, shards
from ...core.dtypes import by_code
from ...core.local_params import LocalParam, local_params
from ...core.tensors import Table
from ...parallel.mesh import ALONE, Mesh
from ...parallel.torch_dtypes import torch_dtype
from .flat_bucket import FlatBucket, ParameterBucket, views
from .gradient_sum import SLOT, GradientSum, ResidentSum, StoredSum
from .own_parameters import SLOT as OWN_SLOT
from .own_parameters import OwnParameters, ResidentParameters, StoredParameters
from .square_sum import square_sum
from .states.open_states import StatePlaces, open_states
from .states.pinned_copies import PinnedCopies
from .states.state_store import StateStore

Fill = Callable[[LocalParam, torch.Tensor], None]  # writes a parameter's initial values, padding included


class FlatBuffers:
    """All buckets of one rank.

    The modules' trainable parameters become views of the buckets; parameters on the meta device get memory this way.

    Args:
        modules: one module per pipeline stage of this rank.
        table: lists the modules' tensors with their slots.
        dtype: the parameters' dtype.
        places: where model states are.
        fill: writes a parameter's initial values; called once for each parameter, in no promised order.

    Attributes:
        buckets: those of the parameters that are trained.
        frozen_buckets: those of frozen parameters, at stage 3.
        shards: the runs of logical boxes that this rank updates.
        frozen_shards: the runs of frozen parameters that this rank holds; `bucket` is an index of `all_buckets`.
        unsharded: the frozen parameters, and buffers, that every rank holds whole.
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
        plans, frozen = buckets(params, layout), frozen_buckets(params, layout)
        runs = shards((*plans, *frozen), layout, rank)
        self.shards: tuple[Shard, ...] = tuple(run for run in runs if run.piece.tensor.trainable)
        self.frozen_shards: tuple[Shard, ...] = tuple(run for run in runs if not run.piece.tensor.trainable)
        self._owners = _owners(modules)
        self._gradients = self._open_gradients(plans, places)
        self._parameters = self._open_parameters((*plans, *frozen), places)
        self.buckets = tuple(self._bucket(index, plan, fill) for index, plan in enumerate(plans))
        self.frozen_buckets = tuple(
            self._frozen_bucket(index, plan, fill) for index, plan in enumerate(frozen, len(plans))
        )
        in_buckets = {local.name for plan in (*plans, *frozen) for local in plan.params}
        self.unsharded = tuple(local for local in params if local.name not in in_buckets)
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
        own, params, parameters = self._parameters_of(plan, fill)
        size, length = plan.size, own.stop - own.start
        whole = self.zero < 2 and self._gradients is None
        grads = torch.zeros(size, dtype=torch.float32, device=self.device) if whole else None
        summed: GradientSum
        if self._gradients is not None:
            held = own if self.zero < 2 else slice(0, length)
            summed = StoredSum(self._gradients, index, held, self.device, self.copies)
        else:
            summed = ResidentSum(torch.zeros(length, device=self.device) if grads is None else grads[own])
        bucket = FlatBucket(
            plan,
            params,
            own,
            ResidentParameters(params[own], self.copies),
            shard,
            parameters,
            holds_masters=self._holds_masters,
            replicate=replicate,
            ends=self.mesh.embedding_group if plan.tied else ALONE,
            sum=summed,
            grads=grads,
            in_place=grads is not None and self.dtype == torch.float32,
        )
        if self.zero == 3:
            bucket.spread(self._own_copy(index, params[own], torch.float32 if self._holds_masters else self.dtype))
        bucket.attach_grads()
        return bucket

    def _frozen_bucket(self, index: int, plan: Bucket, fill: Fill) -> ParameterBucket:
        own, params, parameters = self._parameters_of(plan, fill)
        place = ResidentParameters(params[own], self.copies)
        bucket = ParameterBucket(plan, params, own, place, self.mesh.sharers(plan.family)[0], parameters)
        bucket.spread(self._own_copy(index, params[own], self.dtype))
        return bucket

    def _parameters_of(self, plan: Bucket, fill: Fill) -> tuple[slice, torch.Tensor, tuple[nn.Parameter, ...]]:
        """Returns this rank's range of a bucket, all of it with its first values, and the module's parameters in it."""
        shard, _ = self.mesh.sharers(plan.family)
        length = plan.size // shard.size
        params = torch.zeros(plan.size, dtype=self.dtype, device=self.device)
        parameters = tuple(self._adopt(*place) for place in zip(plan.params, views(plan, params), strict=True))
        with torch.no_grad():
            for local, parameter in zip(plan.params, parameters, strict=True):
                fill(local, parameter.data)
        return slice(shard.rank * length, (shard.rank + 1) * length), params, parameters

    def _own_copy(self, index: int, values: torch.Tensor, dtype: torch.dtype) -> OwnParameters:
        """Returns this rank's part of a bucket at stage 3, apart from the bucket; in `dtype` if it is resident."""
        if self._parameters is None:
            return ResidentParameters(values.to(dtype, copy=True), self.copies)
        own = StoredParameters(self._parameters, index, values.numel())
        own.write(0, values)
        return own

    def _materialize(self, fill: Fill) -> None:
        """Gives memory and values to unsharded parameters that are still on the meta device."""
        for local in self.unsharded:
            if self.unsharded_tensor(local).is_meta:
                dtype = torch_dtype(by_code(local.pieces[0].tensor.dtype))
                parameter = self._adopt(local, torch.zeros(local.shape, dtype=dtype, device=self.device))
                with torch.no_grad():
                    fill(local, parameter.data)

    def unsharded_tensor(self, local: LocalParam) -> torch.Tensor:
        """Returns the module's tensor of an entry of `unsharded`: a parameter, or a buffer with its current values."""
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
        parameter = nn.Parameter(place.data, requires_grad=local.trainable)
        for module, name in self._owners[old]:
            module.register_parameter(name, parameter)
        return parameter

    @property
    def all_buckets(self) -> tuple[ParameterBucket, ...]:
        """The buckets of all parameters, trained ones first."""
        return (*self.buckets, *self.frozen_buckets)

    @property
    def gradients_offloaded(self) -> bool:
        """Whether sums of gradients are in a store."""
        return self._gradients is not None

    def unsharded_params(self) -> Iterator[tuple[LocalParam, torch.Tensor]]:
        """Yields the tensors that this rank always stores whole: `unsharded`, and below stage 3 all others."""
        for bucket in self.buckets if self.zero < 3 else ():
            yield from zip(bucket.plan.params, bucket.views(bucket.params), strict=True)
        for local in self.unsharded:
            yield local, self.unsharded_tensor(local)

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

    def read_frozen(self, shard: Shard, begin: int, end: int) -> torch.Tensor:
        """Returns elements [begin, end) of the box of one of `frozen_shards`, which lie within the run, 1-D."""
        first = shard.start + begin - shard.flat[0]
        return self.all_buckets[shard.bucket].own.read(first, first + end - begin)

    def write_frozen(self, shard: Shard, values: torch.Tensor) -> None:
        """Writes the values of one of `frozen_shards`, 1-D."""
        self.all_buckets[shard.bucket].own.write(shard.start, values)

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
