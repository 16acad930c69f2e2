"""AdamW on the ranges of the flat buckets that this rank owns, with fp32 masters of low-precision parameters."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch.profiler import record_function

from ...checkpoint.save.state_source import Segment, StateSource
from ...core.buckets import Shard, UpdateRun
from ...core.errors import TkError
from ...parallel.collectives import PendingResult, start_all_gather_flat
from ...parallel.torch_dtypes import torch_dtype
from ..config.sections import OptimizerSection
from .adamw_rule import AdamWFactors, AdamWStreams, adamw_rule
from .element_index import RandomBits, runs_of_tensors
from .flat_bucket import FlatBucket
from .flat_buffers import FlatBuffers
from .running_update import RunningUpdate
from .states.host_transfer import HostTransfer
from .states.open_states import StatePlaces, open_states
from .states.state_store import StateRange, StateStore
from .written_values import take_written

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101); one update rule for every ZeRO stage.

    Args:
        buffers: the rank's buckets.
        options: the rule's options.
        places: where model states are; None = in the memory of the device.
        seed: the seed of the random bits that round bf16 moments.

    Attributes:
        step_count: the number of updates made.
        takes_written: whether every update first takes the values that a user wrote into parameters; see
            `take_written_values`.
        behind: whether updates are made on a thread, while the next step begins.
        leaves_gathers: whether gathers of updated parameters may still be under way when `step` returns: a reader of a
            bucket then calls `ensure`. On a GPU they go beside the updates of other buckets and the next step.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        options: OptimizerSection,
        places: StatePlaces | None = None,
        seed: int = 0,
    ) -> None:
        self.buffers = buffers
        self.options = options
        self.step_count = 0
        self.takes_written = self.behind = self.leaves_gathers = False
        self._gathers: dict[int, PendingResult] = {}
        self._running: RunningUpdate | None = None
        self._not_gathered: list[int] = []
        places = places or StatePlaces(buffers.device)
        self._order = range(len(buffers.buckets))[::-1]  # the first layers are in the last buckets
        dtypes = [
            {slot: torch_dtype(kept) for slot, kept in bucket.plan.family.kept_apart(bucket.holds_masters).items()}
            for bucket in buffers.buckets
        ]
        sizes = [bucket.own.size for bucket in buffers.buckets]
        self._states: StateStore = open_states(places.offload.optimizer, dtypes, sizes, places)
        self._transfer = HostTransfer(buffers.device, self._states.device, max(sizes, default=0) * 4)
        self._seed = seed
        self._shards = tuple(
            [shard for shard in buffers.shards if shard.bucket == index] for index in range(len(buffers.buckets))
        )
        self._rule = adamw_rule(self._states.device, buffers.mesh.world)
        for index, bucket in enumerate(buffers.buckets):
            if not bucket.holds_masters:
                self._states.write("master", index, 0, bucket.own.read(0, bucket.own.size))

    def step(self, lr: float, grad_scale: float) -> None:
        """Updates this rank's range of every bucket, then gathers the parameters of the shard group.

        An update `behind` returns at once: `ensure` and `finish` wait for it, and so does every other method. They also
        wait for gathers that are left under way.

        Args:
            lr: the learning rate of this step.
            grad_scale: the factor for gradients, for clipping and the loss scale.
        """
        self.finish()
        self.step_count += 1
        options = self.options
        factors = AdamWFactors(self.step_count, lr, options.betas, options.eps, options.weight_decay, grad_scale)
        if self.behind:
            self._not_gathered = list(self._order)
            self._running = RunningUpdate(partial(self._update_all, factors), self._order)
            return
        with record_function("ShardedAdamW.step"):
            for index in self._update_all(factors):
                self._start_gather(index)
                if not self.leaves_gathers:
                    self._end_gather(index)

    def _update_all(self, factors: AdamWFactors) -> Iterator[int]:
        """Updates every bucket; yields its index then."""
        with torch.no_grad(), self._states.changing(self._order) as ranges:
            for each in ranges:
                bucket = self.buffers.buckets[each.bucket]
                self._update(bucket, each, factors)
                if each.end == bucket.own.size:
                    yield each.bucket

    def ensure(self, index: int) -> None:
        """Returns once a bucket has the values of the newest update; all ranks ask for buckets in the same order.

        Raises:
            TkError: the update failed.
        """
        if self._running is not None and index in self._not_gathered:
            self._running.wait(index)
            self._not_gathered.remove(index)
            self._start_gather(index)
        self._end_gather(index)

    def is_updated(self, index: int) -> bool:
        """Returns whether `ensure` would return at once."""
        return self._running is None or self._running.has_ended(index)

    def finish(self) -> None:
        """Returns once the newest update has ended; raises as `ensure`, and then whenever it is called."""
        if self._running is not None:
            self._running.join()
            while self._not_gathered:
                self.ensure(self._not_gathered[0])
            self._running = None
        while self._gathers:
            self._end_gather(next(iter(self._gathers)))

    def read_ahead(self) -> None:
        """Starts to read what the next update needs first."""
        self.finish()
        self._states.read_ahead(self._order)

    def _update(self, bucket: FlatBucket, each: StateRange, factors: AdamWFactors) -> None:
        own = bucket.own.read(each.begin, each.end)
        params = self._transfer.down("parameters", own)
        grads = self._transfer.down("gradients", bucket.sum.read(each.begin, each.end))
        master = each.slots.get("master", params)
        if self.takes_written:
            take_written(master, params)
        for run, bits in self._runs(bucket, each):
            part = slice(run.begin, run.end)
            exp_avg, exp_avg_sq = (each.slots[name][part] for name in MOMENTS)
            rounded = None if master is params else params[part]
            streams = AdamWStreams(master[part], exp_avg, exp_avg_sq, grads[part], rounded, bits)
            self._rule(streams, factors if run.decay else replace(factors, weight_decay=0.0))
        self._transfer.up(params, own)
        bucket.own.write_back(each.begin, own)

    def _runs(self, bucket: FlatBucket, each: StateRange) -> Iterator[tuple[UpdateRun, RandomBits | None]]:
        """Yields the runs of a range that are updated at once; bf16 moments need random bits, which a tensor has."""
        first = bucket.own_range.start
        runs = bucket.plan.runs_within(first + each.begin, first + each.end)
        if each.slots["exp_avg_sq"].dtype == torch.float32:
            yield from ((run, None) for run in runs)
        else:
            yield from runs_of_tensors(runs, self._shards[each.bucket], each.begin, self._seed)

    def _start_gather(self, index: int) -> None:
        bucket = self.buffers.buckets[index]
        if self.buffers.zero < 3:
            own = bucket.params[bucket.own_range]
            self._gathers[index] = start_all_gather_flat(bucket.params, own, bucket.shard)

    def _end_gather(self, index: int) -> None:
        if gather := self._gathers.pop(index, None):
            gather.wait()

    def publish(self) -> None:
        """Rounds the masters into the parameters and, below stage 3, all-gathers these over the shard group."""
        self.finish()
        for index, bucket in enumerate(self.buffers.buckets):
            if not bucket.holds_masters:
                bucket.own.write(0, self._states.read("master", index, 0, bucket.own.size))
            self._start_gather(index)
            self._end_gather(index)

    def take_written_values(self) -> None:
        """Copies values that a user wrote into parameters to the masters; every rank has made the same changes.

        At stage 3 ParameterGather has taken them into `own` before it freed a unit.
        """
        self.finish()
        apart = [index for index in self._order if not self.buffers.buckets[index].holds_masters]
        with self._states.changing(apart) as ranges:
            for each in ranges:
                own = self.buffers.buckets[each.bucket].own.read(each.begin, each.end)
                take_written(each.slots["master"], self._transfer.down("parameters", own))

    def runs(self, slot: str) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yields each run of a box that this rank updates and that has `slot`, with its values, 1-D, only to be read.

        Slot "master" is the fp32 value of the parameter, also of fp32 parameters, which have no such slot.
        """
        for shard in self.buffers.shards:
            if slot in ("weight", "master") or slot in shard.piece.tensor.states:
                yield shard, self.read(slot, shard, *shard.flat)

    def read(self, slot: str, shard: Shard, begin: int, end: int) -> torch.Tensor:
        """Returns elements [begin, end) of a run's box, which lie within the run, of a slot as `runs` does.

        Slot "weight" gives them in the parameters' dtype.
        """
        self.finish()
        first = shard.start + begin - shard.flat[0]
        last = first + end - begin
        bucket = self.buffers.buckets[shard.bucket]
        if slot == "weight" or (slot == "master" and bucket.holds_masters):
            own = bucket.own.read(first, last)
            return own.to(self.buffers.dtype) if slot == "weight" else own
        return self._states.read(slot, shard.bucket, first, last)

    @property
    def has_file(self) -> bool:
        """Whether states are in a file, from which a save can read them."""
        return self._states.fd >= 0

    def pin(self) -> StateSource | None:
        """Keeps the states that are in a file as they are, for a save that reads them there, until `unpin`.

        Returns:
            The file and its slots; None if states are not in a file, or the disk has no place for the next ones.
        """
        self.finish()
        slots = dict.fromkeys(slot for of_bucket in self._states.dtypes for slot in of_bucket)
        return StateSource(self._states.fd, tuple(slots)) if self._states.pin() else None

    def unpin(self) -> None:
        """Ends what `pin` began. Idempotent."""
        self._states.unpin()

    def segments(self, slot: str, shard: Shard, begin: int, end: int) -> list[Segment]:
        """Returns the places of elements, as `read` counts them, in the file that is pinned."""
        first = shard.start + begin - shard.flat[0]
        return self._states.segments(slot, shard.bucket, first, first + end - begin)

    def write(self, slot: str, shard: Shard, values: torch.Tensor) -> None:
        """Writes a run's values of a slot, 1-D; `publish` completes writes of slot "master"."""
        self.finish()
        bucket = self.buffers.buckets[shard.bucket]
        if slot == "master" and bucket.holds_masters:
            bucket.own.write(shard.start, values)
        else:
            self._states.write(slot, shard.bucket, shard.start, values)

    def close(self) -> None:
        """Gives the states' memory and files back, once no update runs. Idempotent."""
        if self._running is not None:
            with suppress(TkError):  # `finish` has raised it, or the run ends for another reason
                self._running.join()
        self._states.close()
        self._transfer.close()
