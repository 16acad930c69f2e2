"""ZeRO stage 3: parameters are whole only around the module that computes with them.

A unit is what is gathered and freed together: a decoder layer, or what an end of the pipeline holds. Forward gathers a
unit before its first module is called and frees it after its last; backward gathers it again when the gradient of its
output is there. Meanwhile the next unit of the same direction is on its way. Gathering rounds the fp32 masters of each
rank to the parameters' dtype, so no rank keeps low-precision parameters.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...parallel.collectives import Pending, start_all_gather_flat
from .flat_buffers import FlatBucket, FlatBuffers


@dataclass(slots=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        modules: in the order in which forward calls them.
        for_backward: whether backward reads the parameters' values (a lookup's does not).
        pending: the ends of its gathering, where that was begun; None while it is not there.
        ready: whether it can be computed with.
    """

    buckets: list[FlatBucket]
    modules: Sequence[nn.Module]
    for_backward: bool = True
    pending: list[Pending] | None = field(default=None)
    ready: bool = False


class ParameterGather:
    """Gathers and frees the units of one pipeline stage.

    Args:
        units: in forward order.
        prefetch: whether the next unit is gathered while one computes.
        chain: whether a unit's backward has ended when that of the one before it begins; where that is not known,
            only its gradients tell.
    """

    def __init__(self, buffers: FlatBuffers, units: Sequence[Unit], *, prefetch: bool, chain: bool) -> None:
        self.buffers = buffers
        self.units = units
        self.prefetch = prefetch
        self.chain = chain
        self._incomplete: list[int] = []
        self._in_backward = False
        for index, unit in enumerate(units):
            unit.modules[0].register_forward_pre_hook(self._before(index))
            unit.modules[-1].register_forward_hook(self._after(index))

    def begin_backward(self) -> None:
        """From here on modules that are called are recomputed ones: they free nothing."""
        self._in_backward = True
        self._incomplete = [len(unit.buckets) for unit in self.units]

    def bucket_done(self, bucket: FlatBucket) -> None:
        """All gradients of a bucket are there: backward needs its parameters no more."""
        if self.chain:
            return
        index = next(index for index, unit in enumerate(self.units) if bucket in unit.buckets)
        self._incomplete[index] -= 1
        if self._incomplete[index] == 0:
            self._free(self.units[index])

    def end_pass(self) -> None:
        """A forward or backward pass has ended: nothing stays gathered."""
        self._in_backward = False
        for unit in self.units:
            self._free(unit)

    def _before(self, index: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._need(index, -1 if self._in_backward else 1)

        return hook

    def _after(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._in_backward:
                return
            self._free(self.units[index])
            if self.units[index].for_backward:
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self._need(index, -1))

        return hook

    def _need(self, index: int, step: int) -> None:
        """Waits for a unit and begins to gather the one that comes `step` after it; frees what is behind."""
        unit = self.units[index]
        self._start(unit)
        if not unit.ready and unit.pending is not None:
            for gathering in unit.pending:
                gathering.wait()
            unit.ready = True
        if step < 0 and self.chain:
            for behind in self.units[index + 1 :]:
                self._free(behind)
        following = index + step
        if not self.prefetch or not 0 <= following < len(self.units):
            return
        if step > 0 or self.units[following].for_backward:
            self._start(self.units[following])

    def _start(self, unit: Unit) -> None:
        if unit.pending is not None:
            return
        unit.pending = []
        for bucket in unit.buckets:
            bucket.params.untyped_storage().resize_(bucket.plan.size * bucket.params.element_size())
            part = bucket.params[bucket.own].copy_(bucket.own_params)
            unit.pending.append(start_all_gather_flat(bucket.params, part, self.buffers.mesh.shard))

    def _free(self, unit: Unit) -> None:
        if unit.pending is None:
            return
        if not unit.ready:
            for gathering in unit.pending:
                gathering.wait()
        unit.pending, unit.ready = None, False
        for bucket in unit.buckets:
            bucket.params.untyped_storage().resize_(0)


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    """The tensors of a module's output, however they are wrapped."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
