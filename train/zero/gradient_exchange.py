"""Gradients on their way from backward into each rank's reduced range, exchanged while backward goes on.

A bucket is complete when every one of its parameters has had its gradient. Below stage 2 that counts in a stage's last
backward pass of the step; from stage 2 on in each of them, so that whole gradients live only while they are summed.
Buckets are exchanged in one fixed order: data-parallel ranks whose graphs differ still meet in the same collective.

A parameter may have several gradients in one pass: where backward passes are nested, as in reentrant checkpointing,
each brings its own. What comes when its bucket's exchange has begun is late: it is added up apart and exchanged before
the optimizer's step.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from ...core.errors import ConfigError
from ...core.layout import LocalParam
from ...parallel.collectives import (
    PendingResult,
    all_reduce,
    all_reduce_max,
    start_all_reduce,
    start_reduce_scatter_flat,
)
from ...parallel.mesh import Group, Mesh
from .flat_buffers import FlatBucket, FlatBuffers

MAX_IN_FLIGHT = 2  # exchanges at once; more would keep more whole buckets alive


@dataclass(slots=True)
class _Stage:
    """One pipeline stage during a backward pass.

    Attributes:
        buckets: in their order of exchange.
        missing: parameters whose gradient is still to come, per bucket.
        next: the first bucket that was not exchanged yet.
    """

    buckets: list[FlatBucket]
    missing: list[set[int]] = field(default_factory=list)
    next: int = 0


class GradientExchange:
    """Sums gradients over all ranks that saw other data or another copy of a parameter.

    Args:
        sequence_parallel: whether what tensor parallelism does not split sees only its part of the sequence.
        overlap: whether buckets are exchanged as soon as they are complete.

    Attributes:
        every_pass: whether each backward pass of a step exchanges its gradients, not only the last.
        over_replicas: whether a bucket's one exchange sums over all ranks that hold it: where nothing is sharded and
            nothing accumulates apart. Else it sums over the ranks of a shard, and `finish` over the replicas.
        on_complete: per stage, told each bucket all of whose parameters have had their gradient in this pass.
        by_agreement: whether the ranks' order of collectives decides when complete buckets are exchanged (`complete`,
            `exchange`), because other collectives come in between.
        closed: whether gradients that arrive now are refused.
    """

    def __init__(self, buffers: FlatBuffers, *, sequence_parallel: bool, overlap: bool) -> None:
        self.buffers = buffers
        self.mesh: Mesh = buffers.mesh
        self.sequence_parallel = sequence_parallel
        self.overlap = overlap
        self.every_pass = buffers.zero >= 2
        self.over_replicas = not self.every_pass and self.mesh.shard.size == 1
        self.on_complete: list[Callable[[FlatBucket], None]] = []
        self.by_agreement = False
        self.closed = False
        self._late: dict[tuple[int, int], torch.Tensor] = {}
        self._in_flight: list[Callable[[], object]] = []
        self._exchanging = False
        self._stages = [_Stage([]) for _ in buffers.modules]
        this = weakref.ref(self)  # the garbage collector does not see through autograd's hooks
        for bucket in buffers.buckets:
            number = bucket.plan.params[0].stage
            place = len(self._stages[number].buckets)
            self._stages[number].buckets.append(bucket)
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(_arrived, this, number, place, index))
        for stage in self._stages:
            self._forget(stage)

    def begin_step(self) -> None:
        """Forgets what a step left that did not end."""
        self._wait(0)
        self._late.clear()
        for stage in self._stages:
            self._forget(stage)

    def begin_backward(self, last: bool) -> None:
        """A backward pass begins that gives all gradients of its stage; `last` of this step."""
        self._exchanging = self.overlap and (last or self.every_pass)

    def end_backward(self, stage: int, last: bool) -> None:
        """All gradients of a pass have arrived: exchanges what was not complete (parameters that nothing used)."""
        if last or self.every_pass:
            self._exchange(self._stages[stage], len(self._stages[stage].buckets))
        self._forget(self._stages[stage])
        self._exchanging = False

    def complete(self, stage: int = 0) -> int:
        """How many leading buckets can be exchanged now."""
        if not self._exchanging:
            return 0
        missing = self._stages[stage].missing
        return next((place for place, parameters in enumerate(missing) if parameters), len(missing))

    def exchange(self, count: int, stage: int = 0) -> None:
        """Begins the exchange of the leading `count` buckets."""
        self._exchange(self._stages[stage], count)

    def sum_late(self) -> None:
        """Sums late gradients. Every rank calls it before `finish`, whether or not it has any."""
        places = [(number, place) for number, stage in enumerate(self._stages) for place in range(len(stage.buckets))]
        flags = torch.tensor([place in self._late for place in places], dtype=torch.int32, device=self.buffers.device)
        for (number, place), flag in zip(places, all_reduce_max(flags, self.mesh.world).tolist(), strict=True):
            if flag:
                bucket = self._stages[number].buckets[place]
                self._wait(0)
                self._add_late(bucket, self._late.pop((number, place), None))

    def _add_late(self, bucket: FlatBucket, grads: torch.Tensor | None) -> None:
        if grads is None:
            grads = torch.zeros(bucket.plan.size, dtype=torch.float32, device=self.buffers.device)
        if self.over_replicas:
            bucket.own_grads.add_(all_reduce(grads, self.mesh.replicate))
        else:
            part = torch.empty(bucket.own_grads.shape, device=self.buffers.device)
            start_reduce_scatter_flat(part, grads, self.mesh.shard).wait()
            bucket.own_grads.add_(part)

    def finish(self) -> None:
        """Waits for all exchanges of the step; each rank's range is then in `own_grads`."""
        self._wait(0)
        for bucket in self.buffers.buckets:
            if not self.over_replicas:
                all_reduce(bucket.own_grads, self.mesh.replicate)
            if bucket.plan.params[0].tied:
                all_reduce(bucket.own_grads, self.mesh.embedding_group)
            bucket.attach_grads()

    def arrived(self, number: int, place: int, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is there: the `index`-th of the `place`-th bucket of stage `number`."""
        stage = self._stages[number]
        bucket = stage.buckets[place]
        local, start = bucket.plan.params[index], bucket.plan.offsets[index]
        if self.closed:
            raise ConfigError(
                f"{local.name} got a gradient outside of engine.backward: call that, not loss.backward()."
            )
        target = self._target(number, place)[start : start + local.size].view(local.shape)
        if parameter.grad is not None and parameter.grad.data_ptr() != target.data_ptr():
            target.add_(parameter.grad)
            parameter.grad = None
        if index not in stage.missing[place]:
            return
        stage.missing[place].discard(index)
        if stage.missing[place]:
            return
        if self.on_complete:
            self.on_complete[number](bucket)
        if self._exchanging and not self.by_agreement:
            self._exchange(stage, self.complete(number))

    def _target(self, number: int, place: int) -> torch.Tensor:
        """Where gradients of a bucket are added up now, fp32 [size]."""
        bucket = self._stages[number].buckets[place]
        late = place < self._stages[number].next
        grads = self._late.get((number, place)) if late else bucket.grads
        if grads is None:
            grads = torch.zeros(bucket.plan.size, dtype=torch.float32, device=self.buffers.device)
            if late:
                self._late[number, place] = grads
            else:
                bucket.grads = grads
        return grads

    def _exchange(self, stage: _Stage, end: int) -> None:
        """Begins the exchange of the buckets up to `end`."""
        for bucket in stage.buckets[stage.next : end]:
            self._sum_over_tp(bucket)
            bucket.detach_grads()  # a late gradient must not be added to what is on its way
            self._wait(MAX_IN_FLIGHT - 1)
            self._in_flight.append(self._start(bucket))
        stage.next = max(stage.next, end)

    def _start(self, bucket: FlatBucket) -> Callable[[], object]:
        """Begins one exchange; returns what ends it."""
        grads = bucket.grads
        if grads is None:  # nothing used it in this pass, but others wait for it
            grads = torch.zeros(bucket.plan.size, dtype=torch.float32, device=self.buffers.device)
        if self.over_replicas:
            return start_all_reduce(grads, self.mesh.replicate).wait
        part = torch.empty(bucket.own_grads.shape, device=self.buffers.device)
        pending = start_reduce_scatter_flat(part, grads, self.mesh.shard)
        if self.every_pass:
            bucket.grads = None
        return partial(_end_exchange, pending, bucket, part, grads, self.every_pass)

    def _wait(self, limit: int) -> None:
        """Finishes the oldest exchanges until `limit` are left."""
        while len(self._in_flight) > limit:
            self._in_flight.pop(0)()

    def _forget(self, stage: _Stage) -> None:
        stage.next = 0
        stage.missing = [set(range(len(bucket.parameters))) for bucket in stage.buckets]

    def _sum_over_tp(self, bucket: FlatBucket) -> None:
        """Adds up what ranks with the same values saw apart: replicated kv heads, norms of heads, routers; under
        sequence parallelism all that is not split."""
        if bucket.grads is None or self.mesh.tp.size == 1:
            return
        by_group: dict[int, tuple[Group, list[torch.Tensor]]] = {}
        for local, offset in zip(bucket.plan.params, bucket.plan.offsets, strict=True):
            for group, start, size in self._partial(local):
                run = bucket.grads[offset + start : offset + start + size]
                by_group.setdefault(id(group), (group, []))[1].append(run)
        for group, runs in by_group.values():
            summed = all_reduce(torch.cat(runs), group)
            for run, values in zip(runs, summed.split([run.numel() for run in runs]), strict=True):
                run.copy_(values)

    def _partial(self, local: LocalParam) -> Iterator[tuple[Group, int, int]]:
        """The pieces of a parameter whose gradients are partial: over which group, and where."""
        for piece in local.pieces:
            tensor = piece.tensor
            if tensor.partial_grad or (self.sequence_parallel and tensor.split is None):
                yield self.mesh.tp, piece.start, piece.box.size
            elif piece.num_holders > 1:
                yield self.mesh.kv_heads, piece.start, piece.box.size


def _end_exchange(
    pending: PendingResult, bucket: FlatBucket, part: torch.Tensor, grads: torch.Tensor, accumulate: bool
) -> None:
    """Ends an exchange; `grads` is kept alive up to here."""
    pending.wait()
    if accumulate:
        bucket.own_grads.add_(part)
    else:
        bucket.own_grads.copy_(part)


def _arrived(
    exchange: "weakref.ref[GradientExchange]", number: int, place: int, index: int, parameter: torch.Tensor
) -> None:
    alive = exchange()
    if alive is not None:
        alive.arrived(number, place, index, parameter)
