"""ZeRO stage 3: parameters are whole only around the module that computes with them.

A unit is what is gathered and freed together: a decoder layer, or what an end of the pipeline holds. Forward gathers a
unit before its first module is called and frees it after its last; backward gathers it again when the gradient of its
output is there. Meanwhile the next unit of the same direction is on its way. Gathering rounds the fp32 masters of each
rank to the parameters' dtype, so no rank keeps low-precision parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...parallel.collectives import PendingResult, start_all_gather_flat
from .agreement import Act, Agreement
from .flat_buffers import FlatBucket, FlatBuffers
from .outputs import tensors_in
from .saved_parameters import SavedParameters


@dataclass(slots=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        modules: in the order in which forward calls them.
        for_backward: whether backward reads the parameters' values (a lookup's does not).
        all_along: whether they are used between other units, so that they stay until a backward pass ends.
        name: what messages call it.
        pending: the ends of its gathering, where that was begun; None while it is not there.
        ready: whether it can be computed with.
    """

    buckets: list[FlatBucket]
    modules: Sequence[nn.Module]
    for_backward: bool = True
    all_along: bool = False
    name: str = ""
    pending: list[PendingResult] | None = field(default=None)
    ready: bool = False


class ParameterGather:
    """Gathers and frees the units of one pipeline stage.

    Args:
        units: in forward order.
        prefetch: whether the next unit is gathered while one computes.
        chain: whether a unit's backward has ended when that of the one before it begins; where that is not known,
            only its gradients tell.
        agreement: where ranks might gather in different orders.

    Attributes:
        saved: what autograd saves of the units.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        units: Sequence[Unit],
        *,
        prefetch: bool,
        chain: bool,
        agreement: Agreement | None = None,
    ) -> None:
        self.buffers = buffers
        self.units = units
        self.prefetch = prefetch
        self.chain = chain
        self.agreement = agreement
        self._incomplete: list[int] = []
        self._in_backward = False
        self._held = False
        self.saved = SavedParameters([unit.buckets for unit in units], lambda index: self._need(index, Act.BACKWARD))
        for index, unit in enumerate(units):
            unit.modules[0].register_forward_pre_hook(self._before(index))
            unit.modules[-1].register_forward_hook(self._after(index))

    def begin_backward(self) -> None:
        """From here on modules that are called are recomputed ones: they free nothing."""
        self._in_backward = True
        self._incomplete = [len(unit.buckets) for unit in self.units]
        for index, unit in enumerate(self.units):
            if unit.all_along:
                self._need(index, Act.BACKWARD)

    def bucket_done(self, bucket: FlatBucket) -> None:
        """All gradients of a bucket are there: backward needs its parameters no more."""
        if self.chain:
            return
        index = next(index for index, unit in enumerate(self.units) if bucket in unit.buckets)
        self._incomplete[index] -= 1
        if self._incomplete[index] == 0 and not self.units[index].all_along:
            self._free(self.units[index])

    def end_pass(self) -> None:
        """A forward or backward pass has ended: nothing stays gathered.

        Raises:
            TkError: other ranks have not ended it, and gather on.
        """
        ended = Act.END_BACKWARD if self._in_backward else Act.END_FORWARD
        self._in_backward = False
        if self.agreement:
            self.agreement.meet(ended)
        for unit in self.units:
            self._free(unit)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """All units stay gathered meanwhile; every rank enters it."""
        for index in range(len(self.units)):
            self._finish(self._start(index, Act.READ))
        self._held = True
        try:
            yield
        finally:
            self._held = False
            for unit in self.units:
                self._free(unit)

    def one_by_one(self) -> Iterator[Unit]:
        """Gathers a unit after the other, to be read; every rank runs it to its end."""
        for index in range(len(self.units)):
            unit = self._start(index, Act.READ)
            self._finish(unit)
            yield unit
            self._free(unit)

    def _before(self, index: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._need(index, Act.BACKWARD if self._in_backward else Act.FORWARD)

        return hook

    def _after(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        unit = self.units[index]

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._in_backward:
                return
            self._free(unit)
            if unit.for_backward and not unit.all_along:
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self._need(index, Act.BACKWARD))

        return hook

    def _need(self, index: int, act: Act) -> None:
        """Waits for a unit and begins to gather the one that comes next in the pass; frees what is behind."""
        if self._held:
            return
        self._finish(self._start(index, act))
        if act is Act.BACKWARD and self.chain:
            for behind in self.units[index + 1 :]:
                self._free(behind)
        following = index + (1 if act is Act.FORWARD else -1)
        if not self.prefetch or not 0 <= following < len(self.units):
            return
        if act is Act.FORWARD or self.units[following].for_backward:
            self._start(following, act)

    def _start(self, index: int, act: Act) -> Unit:
        unit = self.units[index]
        if unit.pending is not None:
            return unit
        if self.agreement:
            self.agreement.begin(act, index)
        unit.pending = []
        for bucket in unit.buckets:
            bucket.allocate()
            part = bucket.params[bucket.own].copy_(bucket.own_params)
            unit.pending.append(start_all_gather_flat(bucket.params, part, self.buffers.mesh.shard))
        return unit

    def _finish(self, unit: Unit) -> None:
        if unit.ready or unit.pending is None:
            return
        if self.agreement:
            self.agreement.confirm()  # before anything is waited for that another rank may never send
        for gathering in unit.pending:
            gathering.wait()
        for bucket in unit.buckets:
            bucket.show()
        unit.ready = True

    def _free(self, unit: Unit) -> None:
        if unit.pending is None or self._held:
            return
        if not unit.ready:
            for gathering in unit.pending:
                gathering.wait()
        unit.pending, unit.ready = None, False
        for bucket in unit.buckets:
            bucket.free()
