"""The gradient exchange of one rank: it takes gradients from autograd's hooks and sums them over ranks during backward.

A bucket is complete when each of its parameters has received its gradient in the current backward pass. At stages 0
and 1 complete buckets are exchanged in the step's last backward pass of a stage; at stages 2 and 3 in every pass, so
that a whole gradient buffer exists only while it is being filled. Buckets are exchanged in one fixed order, whichever
is complete first. Ranks whose graphs differ then still start the same collectives in the same order.

Nested backward passes, as in reentrant checkpointing, give a parameter several gradients in one pass. A gradient that
arrives after the exchange of its bucket has started is late: late gradients are summed in a buffer of their own and
exchanged before the optimizer's step.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ...core.errors import ConfigError
from ...core.local_params import LocalParam
from ...parallel.collectives import (
    PendingResult,
    all_reduce,
    all_reduce_max,
    start_all_reduce,
    start_reduce_scatter_flat,
)
from ...parallel.mesh import Group, Mesh
from ...parallel.streams import sent
from .flat_bucket import FlatBucket
from .flat_buffers import FlatBuffers
from .trained_parameter import autograd_grad, set_autograd_grad

_BLOCK = 2**18  # elements that are added at once; copies of them stay in cache
MAX_IN_FLIGHT = 2  # exchanges at once where each keeps a whole bucket of gradients alive


@dataclass(slots=True)
class _StageProgress:
    """The progress of one pipeline stage in the current backward pass.

    Attributes:
        buckets: the stage's buckets, in their order of exchange.
        missing: for each bucket, the indices of the parameters that have not received their gradient.
        next: the index of the first bucket whose exchange has not started.
        unreached: the names of the parameters that received a gradient in no pass yet.
    """

    buckets: list[FlatBucket]
    missing: list[set[int]] = field(default_factory=list)
    next: int = 0
    unreached: set[str] = field(default_factory=set)


class GradientExchange:
    """Sums each parameter's gradient over the ranks that saw other data or hold another copy of it.

    Args:
        buffers: the buckets whose gradients are exchanged.
        sequence_parallel: whether parameters that tensor parallelism does not split see only part of the sequence.
        overlap: whether a bucket is exchanged as soon as it is complete; else at the end of the backward pass.

    Attributes:
        offloaded: whether gradients leave the device between passes.
        every_pass: whether every backward pass of a step exchanges its gradients; else only the last one does.
        on_complete: for each stage, a function that is called with a bucket once it is complete.
        by_agreement: whether an Agreement starts the exchanges (`num_complete`, `start_exchanges`); else the hooks do.
            At stage 3 gathers come in between, and all ranks must start gathers and exchanges in one order.
        closed: whether a gradient that arrives now is an error; see `open` and `close`.
    """

    def __init__(self, buffers: FlatBuffers, *, sequence_parallel: bool, overlap: bool) -> None:
        self.buffers = buffers
        self.mesh: Mesh = buffers.mesh
        self.sequence_parallel = sequence_parallel
        self.overlap = overlap
        self.offloaded = buffers.gradients_offloaded
        self.every_pass = buffers.zero >= 2
        frees = self.every_pass or self.offloaded or buffers.device.type == "cpu"  # else a GPU would wait for nothing
        self._most_in_flight = MAX_IN_FLIGHT if frees else max(MAX_IN_FLIGHT, len(buffers.buckets))
        self.on_complete: list[Callable[[FlatBucket], None]] = []
        self.by_agreement = False
        self.closed = False
        self._late: dict[tuple[int, int], torch.Tensor] = {}
        self._in_flight: list[Callable[[], object]] = []
        self._overlapping = False
        self._stages = [_StageProgress([]) for _ in buffers.modules]
        # Autograd keeps hooks in C++, where the garbage collector sees no references: a strong one would be a leak.
        this = weakref.ref(self)
        for bucket in buffers.buckets:
            number = bucket.plan.stage
            place = len(self._stages[number].buckets)
            self._stages[number].buckets.append(bucket)
            self._stages[number].unreached.update(local.name for local in bucket.plan.params)
            for index, parameter in enumerate(bucket.parameters):
                # This hook runs once `parameter.grad` holds the gradient; a plain hook would run before that.
                parameter.register_post_accumulate_grad_hook(partial(_forward_gradient, this, number, place, index))
        for stage in self._stages:
            self._reset(stage)

    def begin_step(self) -> None:
        """Prepares for a step; drops late gradients and progress of a step that failed."""
        self._wait(0)
        self._late.clear()
        for stage in self._stages:
            self._reset(stage)

    def open(self) -> None:
        """Lets gradients arrive, for a backward pass."""
        self.closed = False
        for bucket in self.buffers.buckets:
            bucket.attach_grads()

    def close(self) -> None:
        """Makes a gradient that arrives an error, until `open`: no pass of the engine computes it."""
        self.closed = True
        for bucket in self.buffers.buckets:
            bucket.detach_grads()

    def begin_backward(self, last: bool) -> None:
        """Called before a backward pass that computes all gradients of its stage.

        Args:
            last: whether it is the stage's last backward pass of this step.
        """
        self._overlapping = self.overlap and (last or self.every_pass)

    def end_backward(self, stage: int, last: bool) -> None:
        """Called after a backward pass: exchanges the buckets that are left.

        Buckets are left if nothing used one of their parameters, or if exchanges do not overlap with backward.
        """
        if last or self.every_pass:
            self._start_up_to(self._stages[stage], len(self._stages[stage].buckets))
        elif self.offloaded:
            self._stash(self._stages[stage].buckets)
        self._note_reached(self._stages[stage])
        self._reset(self._stages[stage])
        self._overlapping = False

    def _note_reached(self, stage: _StageProgress) -> None:
        if stage.unreached:
            places = zip(stage.buckets, stage.missing, strict=True)
            stage.unreached &= {bucket.plan.params[index].name for bucket, indices in places for index in indices}

    @property
    def unreached(self) -> frozenset[str]:
        """The names of this rank's parameters that received a gradient in no backward pass yet."""
        return frozenset(name for stage in self._stages for name in stage.unreached)

    def _stash(self, buckets: Sequence[FlatBucket]) -> None:
        """Moves gradients that later passes add to out of the device's memory."""
        for bucket in buckets:
            if bucket.grads is not None:
                bucket.sum.stash(bucket.grads)
                bucket.grads = None

    def num_complete(self, stage: int = 0) -> int:
        """Returns the number of leading buckets that are complete, started ones too; 0 in a pass without overlap."""
        if not self._overlapping:
            return 0
        missing = self._stages[stage].missing
        return next((place for place, parameters in enumerate(missing) if parameters), len(missing))

    def start_exchanges(self, count: int, stage: int = 0) -> None:
        """Starts the exchange of those of the leading `count` buckets that are not exchanged yet."""
        self._start_up_to(self._stages[stage], count)

    def sum_late(self) -> None:
        """Exchanges late gradients. Every rank calls it before `finish`, with or without late gradients of its own."""
        places = [(number, place) for number, stage in enumerate(self._stages) for place in range(len(stage.buckets))]
        flags = sent(torch.tensor([place in self._late for place in places], dtype=torch.int32), self.buffers.device)
        for (number, place), flag in zip(places, all_reduce_max(flags, self.mesh.world).tolist(), strict=True):
            if flag:
                bucket = self._stages[number].buckets[place]
                self._wait(0)
                self._add_late(bucket, self._late.pop((number, place), None))

    def _add_late(self, bucket: FlatBucket, grads: torch.Tensor | None) -> None:
        if grads is None:
            grads = torch.zeros(bucket.plan.size, dtype=torch.float32, device=self.buffers.device)
        if self._is_one_sum(bucket):
            bucket.sum.add(all_reduce(grads, bucket.replicate))
        else:
            part = torch.empty(bucket.own.size, device=self.buffers.device)
            start_reduce_scatter_flat(part, grads, bucket.shard).wait()
            bucket.sum.add(part)

    def finish(self) -> None:
        """Waits for all exchanges of the step. Then `sum` of every bucket is that over all ranks."""
        self._wait(0)
        for bucket in self.buffers.buckets:
            if not self._is_one_sum(bucket):
                self._sum_over(bucket, bucket.replicate)
            self._sum_over(bucket, bucket.ends)  # tied parameters have buckets of their own, cut alike on both stages
            if not self.closed:
                bucket.attach_grads()

    def _sum_over(self, bucket: FlatBucket, group: Group) -> None:
        if group.size > 1:
            own = self.buffers.copies.moved(bucket.sum.read(0, bucket.own.size), self.buffers.device)
            bucket.sum.put(all_reduce(own, group))

    def on_gradient(self, number: int, place: int, index: int, parameter: torch.Tensor) -> None:
        """Takes a gradient from autograd: of parameter `index` in bucket `place` of stage `number`.

        Raises:
            ConfigError: the backward pass was not started through the engine.
        """
        stage = self._stages[number]
        bucket = stage.buckets[place]
        local, start = bucket.plan.params[index], bucket.plan.offsets[index]
        grad = autograd_grad(parameter)
        if self.closed:
            set_autograd_grad(parameter, None)
            raise ConfigError(
                f"{local.name} got a gradient outside of its engine's backward. If it came from loss.backward(), call "
                "engine.backward(loss). If it came from the backward of another engine, that loss goes through both: "
                "for this pass detach this module's output, or freeze the module during its forward pass "
                "(module.requires_grad_(False), and True again before its own); to train both, compute the loss once "
                "for each engine, with the other's output detached."
            )
        target = self._target(number, place)[start : start + local.size].view(local.shape)
        # If `.grad` is a view of the bucket (FlatBucket.attach_grads), autograd has already added to it in place.
        if grad is not None and grad.data_ptr() != target.data_ptr():
            _add(target, grad)
            set_autograd_grad(parameter, None)
        if index not in stage.missing[place]:  # a nested backward pass brought another gradient of the parameter
            return
        stage.missing[place].discard(index)
        if stage.missing[place]:
            return
        if self.on_complete:
            self.on_complete[number](bucket)
        if self._overlapping and not self.by_agreement:
            self._start_up_to(stage, self.num_complete(number))

    def _target(self, number: int, place: int) -> torch.Tensor:
        """Returns the buffer that a bucket's gradients are added to now, fp32 [size]: `grads`, or one for late ones."""
        bucket = self._stages[number].buckets[place]
        late = place < self._stages[number].next  # its exchange has started
        grads = self._late.get((number, place)) if late else bucket.grads
        if grads is None:
            grads = self._new_grads(bucket, stashed=not late)
            if late:
                self._late[number, place] = grads
            else:
                bucket.grads = grads
        return grads

    def _new_grads(self, bucket: FlatBucket, stashed: bool) -> torch.Tensor:
        """Returns a buffer for a whole bucket, with the gradients of earlier passes if these were `stashed`, or 0."""
        kept = bucket.sum.unstash() if stashed and not self.every_pass else None
        if kept is not None:
            return kept
        return torch.zeros(bucket.plan.size, dtype=torch.float32, device=self.buffers.device)

    def _start_up_to(self, stage: _StageProgress, end: int) -> None:
        """Starts the exchange of the buckets before index `end`, in order."""
        for bucket in stage.buckets[stage.next : end]:
            self._sum_over_tp(bucket)
            bucket.detach_grads()  # autograd would add a late gradient to a buffer that the collective reads
            self._wait(self._most_in_flight - 1)
            self._in_flight.append(self._start_exchange(bucket))
        stage.next = max(stage.next, end)

    def _is_one_sum(self, bucket: FlatBucket) -> bool:
        """Whether one all-reduce over the replicas is the whole exchange of a bucket: stages 0 and 1, unless sharded.

        Else a bucket is reduce-scattered over its shard group, and `finish` sums the parts over the replicas.
        """
        return not self.every_pass and bucket.shard.size == 1

    def _start_exchange(self, bucket: FlatBucket) -> Callable[[], object]:
        """Starts the exchange of a bucket; returns the function that waits for it."""
        grads = bucket.grads
        if grads is None:  # no gradient of it arrived in this pass, but other ranks take part in the collective
            grads = self._new_grads(bucket, stashed=True)
        if self.every_pass or self.offloaded:
            bucket.grads = None
        if self._is_one_sum(bucket):
            pending = start_all_reduce(grads, bucket.replicate)
            return partial(_end_exchange, pending, bucket, grads, grads, False) if self.offloaded else pending.wait
        part = torch.empty(bucket.own.size, device=self.buffers.device)
        pending = start_reduce_scatter_flat(part, grads, bucket.shard)
        return partial(_end_exchange, pending, bucket, part, grads, self.every_pass)

    def _wait(self, limit: int) -> None:
        """Waits for the oldest exchanges until at most `limit` are in flight."""
        while len(self._in_flight) > limit:
            self._in_flight.pop(0)()

    def _reset(self, stage: _StageProgress) -> None:
        stage.next = 0
        stage.missing = [set(range(len(bucket.parameters))) for bucket in stage.buckets]

    def _sum_over_tp(self, bucket: FlatBucket) -> None:
        """Sums partial gradients: those of values that tensor-parallel ranks share and computed with different inputs.

        Such values are replicated kv heads, norms of heads and routers; under sequence parallelism every tensor that
        is not split.
        """
        if bucket.grads is None or self.mesh.cutters(bucket.plan.family).size == 1:
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
        """Yields the pieces of a parameter with partial gradients: the group to sum over, first element, length."""
        for piece in local.pieces:
            tensor = piece.tensor
            if tensor.partial_grad or (self.sequence_parallel and tensor.split is None):
                yield self.mesh.cutters(local.family), piece.start, piece.box.size
            elif piece.num_holders > 1:
                yield self.mesh.kv_heads, piece.start, piece.box.size


def _end_exchange(
    pending: PendingResult, bucket: FlatBucket, part: torch.Tensor, grads: torch.Tensor, accumulate: bool
) -> None:
    """Waits for a collective. `grads` is an argument because it reads that memory until then."""
    pending.wait()
    if accumulate:
        bucket.sum.add(part)
    else:
        bucket.sum.put(part)


def _add(total: torch.Tensor, values: torch.Tensor) -> None:
    """Adds a gradient block by block: torch converts the values of another dtype all at once before it adds them."""
    blocks = (flat.split(_BLOCK) for flat in (total.view(-1), values.reshape(-1)))
    for block, added in zip(*blocks, strict=True):
        block.add_(added)


def _forward_gradient(
    exchange: "weakref.ref[GradientExchange]", number: int, place: int, index: int, parameter: torch.Tensor
) -> None:
    """The hook of one parameter: passes its gradient to the exchange, if that still exists."""
    alive = exchange()
    if alive is not None:
        alive.on_gradient(number, place, index, parameter)
