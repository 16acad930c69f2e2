"""The backend on torch's operators: forward passes in tiles of fixed size, logits, the sampler."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .....core.casts import Array
from .....parallel.collectives import all_gather
from .....parallel.mesh import Group
from ...options import MAX_HEAD_ROWS
from ...program.adapters import RankAdapter
from ...program.lower import Program
from ...program.operations import Head, Multiply, Route
from ...step.channel import Channel
from ...step.running_plan import RunningPlan, ranges_within, spans_within
from ...step.sampler_output import SamplerOutput
from ...step.sampling_rows import SamplingRows
from ..backend import Backend, Masks, no_masks
from ..sampler.sampler import best_sampler, run_sampler
from ..step_tensors import SentArray, StepTensors, on_host
from .adapted_products import AdaptedRange, PreparedAdapter, wide_product
from .interpreter import Interpreter
from .kv_cache import KVCache
from .paged_attention import PagedAttention
from .prepared_weights import AnyProduct, PreparedWeights
from .row_tiles import Layer, RowTile, agreeing_sizes, cut


@dataclass(frozen=True, slots=True)
class _Pass:
    """The forward pass of a tile of tokens.

    Attributes:
        inputs: tokens and positions, int64 [2, T], padding included.
        wanted: the places in the tile of the rows of logits.
        attention: the attention of the tokens.
        adapted: the rows with an adapter.
    """

    inputs: SentArray
    wanted: SentArray
    attention: PagedAttention
    adapted: Sequence[AdaptedRange]


class ModelRunner(Backend):
    """A `Backend` that interprets the program.

    Args:
        program: the rank's program.
        weights: its parameters, all of them.
        cache: the rank's KV cache.
        tp: the tensor-parallel group.
        max_batched_tokens: the largest number of tokens of a step.
        with_adapters: whether rows may have adapters.
    """

    kernels = "aten"

    def __init__(
        self,
        program: Program,
        weights: PreparedWeights,
        cache: KVCache,
        tp: Group,
        max_batched_tokens: int,
        with_adapters: bool = False,
    ) -> None:
        self.kv_bytes, self.samples = cache.num_bytes, tp.rank == 0
        self._cache, self._tp = cache, tp
        self._interpreter = Interpreter(program, weights, tp)
        self._numbers = StepTensors(cache.device)
        self._sample = best_sampler()
        # the rows of the last step, and their logits, if some have candidates and may be sampled again
        self._kept: tuple[SamplingRows, Array] | None = None
        self._adapters: dict[int, PreparedAdapter] = {}  # by slot
        prepared = weights.products(program)
        with torch.inference_mode():
            products = _distinct([each for each in program.operations if isinstance(each, Multiply | Route)], prepared)
            inner: list[tuple[Layer, int]] = [*products]
            if with_adapters and weights.dtype != torch.float32:
                inner += [(partial(wide_product, each), width) for each, width in products]
            self.sizes = agreeing_sizes(inner, weights.dtype, cache.device, max_batched_tokens, tp)
            head = _distinct([each for each in program.operations if isinstance(each, Head)], prepared)
            self.head_sizes = agreeing_sizes(head, weights.dtype, cache.device, MAX_HEAD_ROWS, tp)

    @torch.inference_mode()
    def step(self, plan: RunningPlan, masks: Masks = no_masks, channel: Channel | None = None) -> SamplerOutput | None:
        """Computes a step, stores its keys and values; returns and sends the sampler's output on rank 0, else None."""
        outputs, found, kept = [], None, list[Array]()
        for first, logits_RV in self._logits(plan):
            if self._tp.rank == 0:
                if found is None and plan.rows.are_masked:
                    found = masks()
                rows, logits = plan.rows.part(first, first + len(logits_RV)), on_host(logits_RV)
                outputs.append(run_sampler(logits, rows, found, self._sample))
                if plan.rows.have_candidates:
                    kept.append(logits)
        self._kept = (plan.rows, np.concatenate(kept)) if kept else None
        output = SamplerOutput.join(outputs) if outputs else None
        if channel is not None and output is not None:
            channel.send_result(output)
        return output

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Samples the rows of the last step again, some of them with masks: see `Backend`."""
        assert self._kept is not None, "the last step had candidates"
        last, logits_RV = self._kept
        return run_sampler(logits_RV, last.masked(rows), masks, self._sample)

    @torch.inference_mode()
    def logits(self, plan: RunningPlan) -> Array:
        """Computes a step as `step` does; returns the raw logits of its rows on every rank: fp32 [R, vocab_size]."""
        return on_host(torch.cat([logits_RV for _, logits_RV in self._logits(plan)]))

    def pack_adapter(self, slot: int, adapter: RankAdapter) -> Callable[[], object]:
        """Copies an adapter for a slot: see `Backend`."""
        return partial(self._adapters.__setitem__, slot, self._interpreter.prepared(adapter))

    def drop_adapter(self, slot: int) -> None:
        """Frees the memory of the adapter in a slot: see `Backend`."""
        self._adapters.pop(slot, None)

    def _logits(self, plan: RunningPlan) -> Iterator[tuple[int, torch.Tensor]]:
        """Computes a step; yields its logits in parts of at most MAX_HEAD_ROWS rows, with the number of the first.

        A step without rows has one empty part.
        """
        twins, forks = (self._numbers.add(each) for each in (plan.twins, plan.forks))
        passes = [self._pass(plan, tile) for tile in cut(len(plan.tokens), self.sizes)]
        self._numbers.send()
        self._cache.assign(twins.tensor, forks.tensor)
        normed_RD = torch.cat([self._forward(each) for each in passes])
        if not len(normed_RD):
            yield 0, torch.empty(0, self._interpreter.program.vocab_size, device=self._cache.device)
        ranges = plan.adapter_logits
        for first in range(0, len(normed_RD), MAX_HEAD_ROWS):
            yield first, self._heads(normed_RD[first : first + MAX_HEAD_ROWS], first, ranges)

    def _pass(self, plan: RunningPlan, tile: RowTile) -> _Pass:
        """Plans the forward pass of a tile of tokens, before the numbers of the step are sent."""
        part, wanted = slice(tile.first, tile.stop), plan.rows.token
        inputs = np.zeros((2, tile.size), np.int64)
        inputs[:, : tile.stop - tile.first] = plan.tokens[part], plan.positions[part]
        spans = spans_within(plan, tile.first, tile.stop)
        num_heads, windows = self._interpreter.program.num_heads, self._interpreter.windows
        attention = PagedAttention(self._cache, spans, plan.slots[part], num_heads, windows, self._numbers)
        inside = wanted[(wanted >= tile.first) & (wanted < tile.stop)]
        adapted = self._within(plan.adapter_rows, tile)
        return _Pass(self._numbers.add(inputs), self._numbers.add(inside - tile.first), attention, adapted)

    def _forward(self, planned: _Pass) -> torch.Tensor:
        """Returns the normed hidden states of a tile's rows of logits."""
        tokens, positions = planned.inputs.tensor
        normed_TD = self._interpreter.forward(tokens, positions, planned.attention, planned.adapted)
        return normed_TD[planned.wanted.tensor]

    def _within(self, ranges: Array, tile: RowTile) -> list[AdaptedRange]:
        """Returns the rows of a tile that have an adapter, of those of all tiles: int32 [N, 3], as `adapter_rows`."""
        found = ranges_within(ranges, tile.first, tile.stop)
        return [AdaptedRange(rows, self._adapters[slot]) for rows, slot in found]

    def _heads(self, normed_RD: torch.Tensor, first: int, ranges: Array) -> torch.Tensor:
        """Returns the logits of rows, fp32 [R, vocab_size], in tiles; their numbers begin with `first`."""
        tiles = cut(len(normed_RD), self.head_sizes)
        found = []
        for tile in tiles:
            among_all = RowTile(first + tile.first, first + tile.stop, tile.size)
            found.append(self._head(normed_RD[tile.first : tile.stop], tile.size, self._within(ranges, among_all)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _head(self, normed_RD: torch.Tensor, size: int, adapted: Sequence[AdaptedRange]) -> torch.Tensor:
        """Returns the logits of rows that are padded to `size`: fp32 [R, vocab_size]."""
        num_rows = len(normed_RD)
        padded_RD = normed_RD.new_zeros(size, normed_RD.shape[-1])
        padded_RD[:num_rows] = normed_RD
        whole_RV = torch.cat(all_gather(self._interpreter.head(padded_RD, adapted), self._tp), dim=-1)
        return whole_RV[:num_rows, : self._interpreter.program.vocab_size].float()


def _distinct(
    operations: list[Multiply | Route] | list[Head], prepared: dict[str, AnyProduct]
) -> list[tuple[AnyProduct, int]]:
    """Returns one product of each shape, with the width of its rows."""
    found: dict[tuple[object, ...], tuple[AnyProduct, int]] = {}
    for matrix in (operation.matrix for operation in operations):
        each = prepared[matrix.name]
        found.setdefault(each.shapes, (each, matrix.in_features))
    return list(found.values())
