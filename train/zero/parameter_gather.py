"""ZeRO stage 3: parameters are whole only while the modules that hold them compute.

A unit is a group of parameters that is gathered and freed together: a decoder layer, the embedding, or the final norm
with the head. Forward gathers a unit before its first module is called and frees it after its last module. Backward
gathers it again when the gradient of its output arrives. While one unit computes, the gather of the next one is under
way. A gather rounds each rank's fp32 masters to the parameters' dtype, so ranks store no low-precision parameters
unless their masters are offloaded.

    forward   unit 0: gather  compute  free
              unit 1:         gather   compute  free
    backward  unit 1:                                 gather  compute  free
              unit 0:                                         gather   compute  free
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ...core.errors import TkError
from ...parallel.collectives import PendingResult, start_all_gather_flat
from .agreement import Act, Agreement
from .flat_bucket import FlatBucket, ParameterBucket
from .flat_buffers import FlatBuffers
from .outputs import tensors_in
from .running_update import NO_UPDATES, Updates
from .saved_parameters import SavedParameters

_UNTRACED: Final = (
    "At ZeRO stage 3 a block's parameters are gathered when it is called, which torch.compile cannot trace as part of "
    "one graph: leave out fullgraph=True, so that it compiles what is between the gathers, or train at a lower stage."
)


@dataclass(slots=True)
class Unit:
    """Parameters that are gathered and freed together.

    Attributes:
        buckets: the buckets that hold the parameters, trained and frozen ones; they hold no others.
        modules: the modules that hold the parameters, in the order in which forward calls them.
        used_in_backward: whether backward reads the parameters' values; that of an embedding lookup does not.
        kept_for_backward: whether the parameters are used between other units, so that they stay gathered for a whole
            backward pass.
        name: the unit's name in messages.
        pending: the unit's gathers, one per bucket, once they are started; None while the unit is free.
        ready: whether the gathers have ended and the module's parameters have their values.
        output_learns: whether the newest output had a gradient, so that backward needs the unit if it is frozen, too.
    """

    buckets: Sequence[ParameterBucket]
    modules: Sequence[nn.Module]
    used_in_backward: bool = True
    kept_for_backward: bool = False
    name: str = ""
    pending: list[PendingResult] | None = field(default=None)
    ready: bool = False
    output_learns: bool = False

    @property
    def trained(self) -> list[FlatBucket]:
        """The buckets whose parameters have gradients."""
        return [bucket for bucket in self.buckets if isinstance(bucket, FlatBucket)]

    @property
    def has_frozen(self) -> bool:
        """Whether some of its parameters are frozen."""
        return len(self.trained) < len(self.buckets)


class ParameterGather:
    """Gathers and frees the units of one pipeline stage, from hooks on their modules and on their outputs.

    Args:
        buffers: the buckets of this rank.
        units: the stage's units, in forward order.
        prefetch: whether the gather of the next unit starts while a unit computes.
        chain: whether units form a chain, so that the backward of a unit has ended when that of the unit before it
            begins. If it is False, the backward of a unit without frozen parameters has ended once all gradients of its
            buckets have arrived. One with frozen parameters may need them after that, for its input's gradient: it has
            ended if the backward of another unit begins and no tensor refers to its parameters any more.
        agreement: makes ranks gather in one order, if modules may call their units in any order.
        updates: the update of the step before, which may still run.

    Attributes:
        saved: the hooks for tensors that autograd saves of the units.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        units: Sequence[Unit],
        *,
        prefetch: bool,
        chain: bool,
        agreement: Agreement | None = None,
        updates: Updates = NO_UPDATES,
    ) -> None:
        self.buffers = buffers
        self.units = units
        self.prefetch = prefetch
        self.chain = chain
        self.agreement = agreement
        self._updates = updates
        self._numbers: dict[ParameterBucket, int] = {bucket: number for number, bucket in enumerate(buffers.buckets)}
        self._incomplete: list[int] = []
        self._in_backward = False
        self._all_held = False
        self.saved = SavedParameters(
            [unit.buckets for unit in units], lambda index: self._ensure_gathered(index, Act.BACKWARD)
        )
        for index, unit in enumerate(units):
            unit.modules[0].register_forward_pre_hook(self._forward_pre_hook(index))
            unit.modules[-1].register_forward_hook(self._forward_hook(index))

    def begin_backward(self) -> None:
        """Called before a backward pass.

        A module that is called during the pass is being recomputed, and its backward follows: it frees no unit.
        """
        self._in_backward = True
        self._incomplete = [len(unit.trained) for unit in self.units]
        for index, unit in enumerate(self.units):
            if unit.kept_for_backward:
                self._ensure_gathered(index, Act.BACKWARD)

    def on_bucket_complete(self, bucket: FlatBucket) -> None:
        """Called once all gradients of a bucket have arrived: frees its unit if that ends the unit's backward."""
        if self.chain:  # _ensure_gathered frees the units of a chain
            return
        index, unit = next((index, unit) for index, unit in enumerate(self.units) if bucket in unit.buckets)
        self._incomplete[index] -= 1
        if self._incomplete[index] == 0 and not unit.kept_for_backward and not unit.has_frozen:
            self._free(unit)

    def end_pass(self) -> None:
        """Called after a forward or backward pass: frees every unit.

        Raises:
            TkError: another rank has not ended the pass and gathers another unit.
        """
        ended = Act.END_BACKWARD if self._in_backward else Act.END_FORWARD
        self._in_backward = False
        if self.agreement:
            self.agreement.synchronize(ended)
        self.free_all()

    def free_all(self, written: bool = False) -> None:
        """Frees every unit: the next pass gathers the masters' values.

        Args:
            written: whether someone else than the modules may have written into the parameters.
        """
        for unit in self.units:
            self._free(unit, written)

    @contextmanager
    def hold_all(self) -> Iterator[None]:
        """Keeps all units gathered within the `with` block, which every rank enters."""
        for index in range(len(self.units)):
            self._finish_gather(self._start_gather(index, Act.READ))
        self._all_held = True
        versions = self._versions()
        try:
            yield
        finally:
            self._all_held = False
            self.saved.version += self._versions() != versions
            self.free_all(written=True)

    def _versions(self) -> list[int]:
        """Returns the numbers of writes into the parameters that autograd has seen, while they are gathered."""
        return [param._version for unit in self.units for bucket in unit.buckets for param in bucket.parameters]

    def each_unit(self) -> Iterator[Unit]:
        """Gathers, yields and frees one unit after another; every rank iterates to the end."""
        for index in range(len(self.units)):
            unit = self._start_gather(index, Act.READ)
            self._finish_gather(unit)
            yield unit
            self._free(unit)

    def _forward_pre_hook(self, index: int) -> Callable[[nn.Module, Any], None]:
        owner = self.units[index].modules[0]

        def hook(module: nn.Module, inputs: Any) -> None:
            leave_to_python()
            if module is owner:  # a deep copy has the hooks, too
                self._ensure_gathered(index, Act.BACKWARD if self._in_backward else Act.FORWARD)

        return hook

    def _forward_hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        unit = self.units[index]

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            leave_to_python()
            if self._in_backward or module is not unit.modules[-1]:
                return
            self._free(unit)
            learning = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            unit.output_learns = bool(learning)
            for tensor in learning if unit.used_in_backward and not unit.kept_for_backward else ():
                # A tensor's hook runs when its gradient is computed, which is just before the unit's own backward. A
                # module's backward hook would wrap inputs and outputs and break in-place changes.
                tensor.register_hook(lambda grad: self._ensure_gathered(index, Act.BACKWARD))

        return hook

    def _ensure_gathered(self, index: int, act: Act) -> None:
        """Gathers a unit if it is free, waits for it, and starts the gather of the unit that comes next in the pass.

        In the backward pass of a chain it frees the units behind it, whose backward has ended, before that next gather:
        at most two units have memory at a time.
        """
        if self._all_held:
            return
        self._finish_gather(self._start_gather(index, act))
        if act is Act.BACKWARD:
            for number, other in enumerate(self.units):
                if number > index if self.chain else number != index and self._has_ended(number):
                    self._free(other)
        following = index + (1 if act is Act.FORWARD else -1)
        if not self.prefetch or not 0 <= following < len(self.units):
            return
        if act is Act.FORWARD and self.chain and not self._is_updated(self.units[following]):
            return  # this rank gathers it later, in the same order as the others, and computes meanwhile
        if act is Act.FORWARD or self._is_used_in_backward(self.units[following]):
            self._start_gather(following, act)

    def _has_ended(self, index: int) -> bool:
        """Whether a unit with frozen parameters, which is not of a chain, has made its backward pass."""
        unit = self.units[index]
        if not self._in_backward or not unit.ready or unit.kept_for_backward or self._incomplete[index]:
            return False
        return unit.has_frozen and not any(bucket.is_referred_to for bucket in unit.buckets)

    def _is_used_in_backward(self, unit: Unit) -> bool:
        return unit.used_in_backward and (unit.output_learns or bool(unit.trained))

    def _is_updated(self, unit: Unit) -> bool:
        return all(self._updates.is_updated(self._numbers[bucket]) for bucket in unit.trained)

    def _start_gather(self, index: int, act: Act) -> Unit:
        """Starts the gathers of a unit, unless they are started, and returns it."""
        unit = self.units[index]
        if unit.pending is not None:
            return unit
        if self.agreement:
            self.agreement.announce(act, index)
        unit.pending = []
        for bucket in unit.buckets:
            if bucket in self._numbers:
                self._updates.ensure(self._numbers[bucket])
            bucket.allocate()
            # This rank's values are rounded into their place, from where the others receive them.
            part = bucket.params[bucket.own_range]
            self.buffers.copies.copy(part, bucket.own.read(0, bucket.own.size))
            unit.pending.append(start_all_gather_flat(bucket.params, part, bucket.shard))
        return unit

    def _finish_gather(self, unit: Unit) -> None:
        """Waits for the gathers of a unit and gives its parameters their values."""
        if unit.ready or unit.pending is None:
            return
        if self.agreement:
            self.agreement.confirm()  # first: another rank may never send its part of this gather
        for gathering in unit.pending:
            gathering.wait()
        for bucket in unit.buckets:
            bucket.attach_params()
        unit.ready = True

    def _free(self, unit: Unit, written: bool = False) -> None:
        if unit.pending is None or self._all_held:
            return
        if not unit.ready:  # a prefetched unit that was not used: the collective still writes to its memory
            for gathering in unit.pending:
                gathering.wait()
        by_pass = not self.chain  # the modules of a chain are ours, which write nothing
        for bucket in unit.buckets if unit.ready else ():
            if written or (by_pass and bucket.may_be_written):
                bucket.take_written()
        unit.pending, unit.ready = None, False
        for bucket in unit.buckets:
            bucket.free()


def leave_to_python() -> None:
    """Ends the tracing of torch.compile, which then leaves the hook and the call around it to Python.

    Raises:
        TkError: the call is traced; a user sees it only with fullgraph=True.
    """
    if torch.compiler.is_dynamo_compiling():
        raise TkError(_UNTRACED)
