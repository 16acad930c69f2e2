"""The backend of C kernels: a step in one call, on threads of its own."""

import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref
from functools import partial

import numpy as np

from .....checkpoint.read.shared_read import ALONE, Peers
from .....core.casts import Array
from ...kv_formats import CacheShape
from ...program.adapters import RankAdapter
from ...program.lower import Program
from ...step.channel import Channel
from ...step.running_plan import RunningPlan
from ...step.sampler_output import SamplerOutput
from ...step.sampling_rows import SamplingRows
from ..backend import Backend, DecodedAhead, Masks, no_masks
from ..sampler.native_sampler import native_sampler
from ..sampler.sampler import run_sampler
from .adapters import EMPTY, AdapterSlots
from .binding.structures import NativeModel
from .buffers import RankBuffers
from .decode_ahead import AssignedPlan, assign
from .kv_cache import NativeCache
from .operations import prepare_operations
from .packing import PackedWeights, format_of
from .sampling import StepSampler


class NativeRunner(Backend):
    """A `Backend` that computes on CPUs.

    Args:
        program: the rank's program.
        weights: its packed parameters, all of them.
        cache: the shape of the rank's cache.
        max_tokens: the largest number of tokens of a step.
        peers: the ranks of the model.
        adapters: the number of adapters in memory, and their largest rank.
    """

    def __init__(
        self,
        program: Program,
        weights: PackedWeights,
        cache: CacheShape,
        max_tokens: int,
        threads: int,
        peers: Peers = ALONE,
        adapters: tuple[int, int] = (0, 0),
    ) -> None:
        kernels = weights.kernels
        self.kernels = f"native {kernels.instruction_set}"
        self.samples = True
        self._program, self._weights = program, weights
        self._adapters = AdapterSlots(program, weights, adapters[0])
        self._operations = prepare_operations(program, weights, self._adapters)
        self._cache = NativeCache(program, cache)
        self._buffers = RankBuffers(program, cache, max_tokens, threads, peers, weights.weight_dtype, adapters[1])
        self._model = model = NativeModel(
            operations=ctypes.addressof(self._operations),
            num_operations=len(self._operations),
            tp=program.tp,
            rank=program.rank,
            num_layers=program.num_layers,
            heads=program.num_heads,
            kv_heads=program.num_kv_heads,
            head_dim=program.head_dim,
            rotated=program.rope.rotated(program.head_dim) if program.rope else 0,
            weight_format=format_of(weights.dtype),
            attention_scaling=1.0 if program.rope is None else program.rope.attention_scaling,
            hidden_size=program.hidden_size,
        )
        self._cache.fill(model)
        self._buffers.fill(model)
        sampler = native_sampler()
        self._sampler = StepSampler(sampler, self._buffers, program.vocab_size, threads) if sampler else None
        self.kv_bytes = self._cache.num_bytes
        self._assigned: AssignedPlan | None = None
        kernels.start_threads(byref(model), threads)

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        if self._model.pool:
            self._weights.kernels.stop_threads(byref(self._model))

    def step(self, plan: RunningPlan, masks: Masks = no_masks, channel: Channel | None = None) -> SamplerOutput:
        """Computes a step, stores its keys and values; returns the sampler's output on every rank.

        Where a row has a mask, the logits are computed while it is made, and sampled in a call of their own. Otherwise
        C sends the results, unless they have log-probabilities or come in parts.
        """
        self._assign(plan)
        are_masked = plan.rows.are_masked
        outputs, found, sampler = [], None, self._sampler
        self._model.sampling = sampler.address if sampler and not are_masked else None
        for rows in self._run(plan, channel):
            if are_masked and found is None:
                found = masks()
            if sampler is None:  # every rank comes to the same results
                outputs.append(run_sampler(self._logits(len(rows)), rows, found))
                continue
            if are_masked:
                self._sample(sampler, rows, found)
            outputs.append(sampler.output(rows))
        output = outputs[0] if len(outputs) == 1 else SamplerOutput.join(outputs)
        if channel is not None and not self._model.channel:
            channel.send_result(output)
        return output

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Samples the rows of the last step again, some of them with masks: see `Backend`."""
        assert self._assigned is not None, "there was a step before"
        again, sampler = self._assigned.rows.masked(rows), self._sampler
        if sampler is None:
            return run_sampler(self._logits(len(again)), again, masks)
        self._sample(sampler, again, masks, again=True)
        return sampler.output(again)

    def decode_ahead(self, plan: RunningPlan, channel: Channel) -> DecodedAhead | None:
        """Computes the engine's next steps within one call into C: see `Backend` and c/decode_ahead.h."""
        if self._sampler is None or not plan.all_sample:
            return None
        ahead = self._sampler.decode_ahead(plan, channel)
        if ahead is None:
            return None
        steps = self._weights.kernels.decode_ahead(byref(self._model), byref(ahead.arguments))
        if ahead.arguments.num_candidates:
            return DecodedAhead(None, bool(ahead.arguments.has_next), ahead.new_blocks)
        if not steps:
            return None
        tokens = self._sampler.tokens(self._model.head_count)
        return DecodedAhead(tokens, new_blocks=ahead.new_blocks, newest=ahead.newest(self._model, tokens))

    def pack_adapter(self, slot: int, adapter: RankAdapter) -> Callable[[], object]:
        """Packs an adapter for a slot: see `Backend`."""
        return partial(self._adapters.put, slot, self._adapters.pack(adapter))

    def drop_adapter(self, slot: int) -> None:
        """Frees the memory of the adapter in a slot: see `Backend`."""
        self._adapters.put(slot, EMPTY)

    def logits(self, plan: RunningPlan) -> Array:
        """Computes a step as `step` does; returns the raw logits of its rows on every rank: fp32 [R, vocab_size]."""
        self._assign(plan)
        self._model.sampling = None
        return np.concatenate([self._logits(len(rows)).copy() for rows in self._run(plan)])

    def _assign(self, plan: RunningPlan) -> None:
        """Points the kernels to a plan, unless they read it already, and it has just advanced."""
        if not plan.generation or self._assigned is None or plan.generation != self._assigned.generation:
            self._assigned = assign(plan, self._model)
            self._cache.assign(plan.twins, plan.forks)

    def _run(self, plan: RunningPlan, channel: Channel | None = None) -> Iterator[SamplingRows]:
        """Computes the step of the assigned plan in parts of its rows; yields each when its logits are sampled.

        The next part overwrites logits and samples; a step without rows has one empty part.
        """
        model, num_rows, most = self._model, len(plan.rows), len(self._buffers.logits)
        compute, model.channel = self._weights.kernels.step, None
        for first in range(0, max(1, num_rows), most):
            rows = plan.rows.part(first, first + most)
            model.head_first, model.head_count = first, len(rows)
            if self._sampler is not None and model.sampling:
                self._sampler.prepare(rows, plan.generation if num_rows <= most else 0)
                exchange = self._sampler.exchange(channel) if channel is not None and num_rows <= most else None
                model.channel = None if exchange is None else exchange.address
            compute(byref(model))
            yield rows
            compute = self._weights.kernels.head

    def _sample(self, sampler: StepSampler, rows: SamplingRows, masks: Array | None, again: bool = False) -> None:
        """Samples the rows whose logits were computed last, perhaps again."""
        sampler.prepare(rows, masks=masks, again=again)
        self._model.sampling = sampler.address
        self._weights.kernels.sample(byref(self._model))
        self._model.sampling = None  # as long as the step goes on

    def _logits(self, num_rows: int) -> Array:
        """Returns the logits of all ranks without padding; a view on one rank."""
        rows_of_rank = self._operations[-1].matrix.outputs  # those of the head, which is last
        parts = self._buffers.logits[:num_rows, :, :rows_of_rank]
        return parts.reshape(num_rows, parts.shape[1] * rows_of_rank)[:, : self._program.vocab_size]
