"""The buffers of one bucket on one rank: its parameters and, if they are trained, their gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ...core.buckets import Bucket
from ...parallel.mesh import Group
from .absent import Presence
from .gradient_sum import GradientSum
from .own_parameters import OwnParameters
from .trained_parameter import set_autograd_grad
from .written_values import take_written


@dataclass(slots=True, eq=False)
class ParameterBucket:
    """The parameters of one bucket; as it is, of frozen ones that ZeRO stage 3 shards.

    Attributes:
        plan: the parameters of the bucket and their offsets.
        params: all parameters, in the model's dtype [size]; the module's parameters are views of it. At stage 3 its
            memory is allocated only while the parameters are gathered.
        own_range: this rank's part of the bucket, 1/N of it.
        own: the parameters in `own_range` [size / N]: a view of `params` below stage 3, a copy at stage 3.
        shard: the ranks over which the bucket is sharded.
        parameters: the module's parameters, in the plan's order.
        presence: at stage 3, gives the parameters their values and takes them away.
        num_references: the tensors that refer to the memory of gathered parameters when they get their values.
        num_writes: the writes into the parameters that autograd has seen until then.
    """

    plan: Bucket
    params: torch.Tensor
    own_range: slice
    own: OwnParameters
    shard: Group
    parameters: tuple[nn.Parameter, ...]
    presence: Presence = field(init=False)
    num_references: int = field(init=False, default=0)
    num_writes: int = field(init=False, default=0)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields for each parameter its part of `flat` [size], in the parameter's shape."""
        return views(self.plan, flat)

    def spread(self, own: OwnParameters) -> None:
        """Leaves this rank its part of the parameters, `own`, and frees the others: stage 3, before the first pass."""
        self.own = own
        names = [local.name for local in self.plan.params]
        self.presence = Presence(self.parameters, names, tuple(self.views(self.params)))
        self.free()

    def allocate(self) -> None:
        """Allocates the memory of `params`, with undefined values."""
        self.params.untyped_storage().resize_(self.plan.size * self.params.element_size())

    def attach_params(self) -> None:
        """Makes the module's parameters views of `params`, once its values are gathered."""
        self.presence.restore()
        self.num_references, self.num_writes = self._count_references(), self._count_writes()

    @property
    def is_referred_to(self) -> bool:
        """Whether a tensor that was made since `attach_params` refers to gathered parameters: backward will need them.

        Only a forward pass that is recomputed leaves such tensors; autograd saves places otherwise (SavedParameters).
        """
        return self._count_references() > self.num_references

    def _count_references(self) -> int:
        count: int = torch._C._storage_Use_Count(self.params.untyped_storage()._cdata)
        return count

    def _count_writes(self) -> int:
        return sum(parameter._version for parameter in self.parameters)

    @property
    def may_be_written(self) -> bool:
        """Whether a pass may have changed gathered parameters; frozen ones change by writes that autograd sees."""
        return self._count_writes() != self.num_writes

    def take_written(self) -> None:
        """Copies what a user wrote into gathered parameters to `own`, at stage 3."""
        self.own.write(0, self.params[self.own_range])

    def free(self) -> None:
        """Takes the values away from the module's parameters and frees the memory of `params`."""
        self.presence.remove()
        # Only the storage shrinks: tensor objects, and the views that autograd holds, stay the same.
        self.params.untyped_storage().resize_(0)


@dataclass(slots=True, eq=False)
class FlatBucket(ParameterBucket):
    """The parameters of one bucket with their gradients; the rank updates those in `own_range`.

    Attributes:
        holds_masters: whether `own` are the fp32 masters; else these are in slot "master" of the states.
        replicate: the ranks that update the same range.
        ends: the ranks that hold copies of a tied bucket on other stages; else this rank alone.
        sum: the reduced gradients in `own_range`, fp32 [size / N].
        grads: the sum of this rank's gradients, fp32 [size]; None between backward passes from stage 2 on, and if
            gradients are offloaded.
        in_place: whether autograd accumulates directly into `grads`; it can if parameters are fp32 and `grads` stays.
    """

    holds_masters: bool
    replicate: Group
    ends: Group
    sum: GradientSum
    grads: torch.Tensor | None
    in_place: bool

    @property
    def may_be_written(self) -> bool:
        """True: trained parameters are also written by means that autograd does not see, as `parameter.data`."""
        return True

    def take_written(self) -> None:
        """Copies what a user wrote into gathered parameters to `own`, at stage 3; masters keep their digits."""
        written = self.params[self.own_range]
        if self.holds_masters and self.params.dtype != torch.float32:
            take_written(self.own.read(0, self.own.size), written)
        else:
            self.own.write(0, written)

    def attach_grads(self) -> None:
        """Makes autograd accumulate directly into `grads`, if `in_place`: it adds to a `.grad` that exists."""
        if self.grads is not None and self.in_place:
            for parameter, view in zip(self.parameters, self.views(self.grads), strict=True):
                set_autograd_grad(parameter, view)

    def detach_grads(self) -> None:
        """Keeps autograd from writing into `grads` while a collective reads it."""
        for parameter in self.parameters if self.in_place else ():
            set_autograd_grad(parameter, None)


def views(plan: Bucket, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields for each parameter of a bucket its part of `flat` [size], in the parameter's shape."""
    for local, offset in zip(plan.params, plan.offsets, strict=True):
        yield flat[offset : offset + local.size].view(local.shape)
