"""The backend on a GPU: graphs for steps of single tokens, launches of kernels for all others, tokens chosen there.

Rows that the device does not sample (see `SamplingRows.are_plain`) go through the host's sampler.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ......core.casts import Array
from ....options import MAX_HEAD_ROWS
from ....program.adapters import RankAdapter
from ....step.channel import Channel
from ....step.running_plan import RunningPlan, ranges_within
from ....step.sampler_output import SamplerOutput
from ...aten.adapted_products import AdaptedRange
from ...backend import Backend, DecodedAhead, Masks, no_masks
from ..step.decode_ahead import decode_ahead
from ..step.device_tables import RowOptions, StepOnDevice, send_columns
from ..step.host_rows import HostRows
from ..step.result_copies import ResultCopies, ResultCopy
from ..step.step_adapters import RowTiles, StepAdapters
from ..step.step_columns import TILE_COLUMNS, step_columns
from .decode_graphs import DecodeGraphs
from .decoder import GpuDecoder
from .kernels import GpuKernels
from .loaded_rank import LoadedRank


class TritonRunner(Backend):
    """A `Backend` that computes on a GPU; every rank samples.

    Args:
        loaded: the rank's program, cache and group.
        decoder: the program with weights and kernels.
        kernels: these kernels.
        graphs: the graphs of steps of single tokens.
    """

    kernels = "triton"
    samples = True

    def __init__(
        self,
        loaded: LoadedRank,
        decoder: GpuDecoder,
        kernels: GpuKernels,
        graphs: DecodeGraphs,
    ) -> None:
        self.kv_bytes = loaded.cache.num_bytes
        self._decoder, self._gpu_kernels, self._graphs = decoder, kernels, graphs
        self._cache, self._vocab_size = loaded.cache, loaded.program.vocab_size
        self._adapters = loaded.adapters
        self._host = ResultCopies(self._cache.device, self._vocab_size)
        self._host_rows = HostRows()
        self._assigned = 0  # the generation whose twins and forks the cache has
        self._known: Array | None = None  # the tokens of the last step, which the device has in the next one's columns

    @torch.inference_mode()
    def step(self, plan: RunningPlan, masks: Masks = no_masks, channel: Channel | None = None) -> SamplerOutput:
        """Computes a step, stores its keys and values; returns and sends the sampler's output."""
        plain = plan.rows.are_plain
        self._host_rows.begin(plan.rows)
        outputs, found = [], None
        for first, logits_RV, result in self._results(plan):
            rows = slice(first, first + len(logits_RV))
            others = np.flatnonzero(~plain[rows])
            copy = self._host.start(result, logits_RV, others)
            if found is None and plan.rows.are_masked:
                found = masks()
            outputs.append(self._host_rows.output(rows, others, *copy.wait(), found))
        output = SamplerOutput.join(outputs)
        if channel is not None:
            channel.send_result(output)
        self._known = output.token_ids if self._graphs.takes(plan) and plain.all() else None
        return output

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Samples the rows of the last step again, some of them with masks: see `Backend`."""
        return self._host_rows.sample_again(masks, rows)

    @torch.inference_mode()
    def decode_ahead(self, plan: RunningPlan, channel: Channel) -> DecodedAhead | None:
        """Starts further steps before the results of those before them have been read: see `Backend`."""
        if self._known is None or not plan.generation:
            return None
        tokens = decode_ahead(plan, channel, self._known, self._follow, self._cache.block_size)
        if tokens is None:
            return None
        self._known = tokens
        return DecodedAhead(tokens)

    @torch.inference_mode()
    def logits(self, plan: RunningPlan) -> Array:
        """Computes a step as `step` does; returns the raw logits of its rows on every rank: fp32 [R, vocab_size]."""
        found: Array = torch.cat([logits_RV.clone() for _, logits_RV, _ in self._results(plan)]).cpu().numpy()
        self._known = None
        return found

    def pack_adapter(self, slot: int, adapter: RankAdapter) -> Callable[[], object]:
        """Copies an adapter for a slot: see `Backend`."""
        assert self._adapters is not None, "the job has slots"
        return partial(self._adapters.put, slot, self._adapters.pack(adapter))

    def drop_adapter(self, slot: int) -> None:
        """Frees the memory of the adapter in a slot: see `Backend`."""
        assert self._adapters is not None, "the job has slots"
        self._adapters.drop(slot)

    def _follow(self, plan: RunningPlan, positions: Array) -> ResultCopy:
        """Starts the step at some positions that follows the last one, and the copy of its results."""
        logits_RV, result = self._graphs.follow(plan, positions)
        return self._host.start(result, logits_RV, np.empty(0, np.int64))

    def _results(self, plan: RunningPlan) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Computes a step; yields the first row, the logits and the device's samples of parts of its rows.

        A step without rows has one empty part.
        """
        self._assign(plan)
        if self._graphs.takes(plan):
            yield 0, *self._graphs.start(plan, self._known)
            return
        tiles = self._gpu_kernels.query_tiles(plan.span_length)
        sent = send_columns(step_columns(plan) | {"tiles": tiles}, self._cache.device)
        normed_TD = self._decoder.forward(_step(plan, sent))
        normed_RD = normed_TD[sent["wanted"].long()]
        options = RowOptions.of(sent)
        for first in range(0, max(1, len(normed_RD)), MAX_HEAD_ROWS):
            part = slice(first, first + MAX_HEAD_ROWS)
            yield first, *self._sampled(normed_RD[part], options.part(part), self._with_heads(plan, part))

    def _with_heads(self, plan: RunningPlan, part: slice) -> list[AdaptedRange]:
        """Returns the rows of a part whose adapters have heads of their own."""
        if self._adapters is None:
            return []
        held = self._adapters.held
        ranges = ranges_within(plan.adapter_logits, part.start, part.stop)
        return [AdaptedRange(rows, held[slot]) for rows, slot in ranges if self._adapters.has_head(slot)]

    def _sampled(
        self, normed_RD: torch.Tensor, options: RowOptions, adapted: Sequence[AdaptedRange]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_RV = torch.empty(len(normed_RD), self._vocab_size, device=self._cache.device)
        if not len(normed_RD):
            return logits_RV, torch.empty(2, 0, dtype=torch.int32, device=self._cache.device)
        self._decoder.head(normed_RD, logits_RV, adapted)
        return logits_RV, self._gpu_kernels.sample(logits_RV, options)

    def _assign(self, plan: RunningPlan) -> None:
        """Assigns a plan's twins and forks, once for the steps in which it advances."""
        if plan.generation and plan.generation == self._assigned:
            return
        self._assigned = plan.generation
        if len(plan.twins) or len(plan.forks):
            sent = send_columns({"twins": plan.twins, "forks": plan.forks}, self._cache.device)
            pairs = (sent[name].long().view(-1, 2) for name in ("twins", "forks"))
            self._cache.assign(*pairs)


def _step(plan: RunningPlan, sent: Mapping[str, torch.Tensor]) -> StepOnDevice:
    return StepOnDevice(
        tokens=sent["tokens"],
        positions=sent["positions"],
        slots=sent["slots"],
        firsts=sent["firsts"],
        starts=sent["starts"],
        lengths=sent["lengths"],
        tables=sent["tables"].view(plan.block_tables.shape),
        tiles=sent["tiles"].view(-1, 2),
        is_decoding=False,
        adapters=_adapted(sent),
    )


def _adapted(sent: Mapping[str, torch.Tensor]) -> StepAdapters | None:
    if "numbers" not in sent:
        return None
    return StepAdapters(sent["numbers"], RowTiles(*(sent[name] for name in TILE_COLUMNS)))
