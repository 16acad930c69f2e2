"""The plan of a step as plain arrays, which every rank makes from the engine's message and its backend carries out.

A plan is complete, so backends keep no state about requests. Letters: T packed tokens, S spans (one per sequence), R
rows of logits.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ....core.casts import Array
from .sampling_rows import SAMPLE, SamplingRows

NO_ADAPTER: Final = -1  # the slot of an adapter of rows without one


@dataclass(slots=True, eq=False)
class RunningPlan:
    """The computation of one step, and of those that follow with the tokens that it samples: then it advances in place.

    The tokens of a span are consecutive in `tokens`; the spans have the order of `span_length`.

    Attributes:
        generation: the number of the plan. It stays while the plan advances, so a backend that has prepared arrays of
            that number has no more to do. 0: the plan is carried out once.
        tokens: the token ids.
        positions: the position of each token in its sequence.
        slots: the cache slot of each token's key and value: block * block_size + offset.
        span_length: the number of tokens of each span.
        block_tables: the blocks of each span's sequence, padded with the null block 0.
        rows: the rows of logits to compute; their `new_number` advances.
        twins: blocks that get a twin, and the numbers of their twins (see `CacheShape.num_twins`).
        forks: blocks, and others that get their content before anything is stored, cleared or read.
        adapters: the slot of each span's adapter, NO_ADAPTER without one; empty if no span has one.
    """

    tokens: Array  # int32 [T]
    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    span_length: Array  # int32 [S]
    block_tables: Array  # int32 [S, B]
    rows: SamplingRows
    twins: Array = field(default_factory=lambda: np.empty((0, 2), np.int32))  # int32 [.., 2]
    forks: Array = field(default_factory=lambda: np.empty((0, 2), np.int32))  # int32 [.., 2]
    generation: int = 0
    adapters: Array = field(default_factory=lambda: np.empty(0, np.int32))  # int32 [S] or [0]

    @property
    def adapter_rows(self) -> Array:
        """The packed tokens with an adapter: ranges [first, stop) and the adapter's slot, int32 [N, 3], ascending."""
        if not len(self.adapters):
            return np.empty((0, 3), np.int32)
        stop = np.cumsum(self.span_length, dtype=np.int32)
        is_last = np.append(self.adapters[1:] != self.adapters[:-1], True)  # neighbours of one adapter are one range
        stop, slot = stop[is_last], self.adapters[is_last]
        ranges = np.stack([np.append(np.int32(0), stop[:-1]), stop, slot], axis=1)
        held: Array = ranges[slot != NO_ADAPTER]
        return held

    @property
    def adapter_logits(self) -> Array:
        """The rows of logits with an adapter, as `adapter_rows` has the tokens; rows ascend."""
        ranges: Array = self.adapter_rows.copy()
        ranges[:, :2] = np.searchsorted(self.rows.token, ranges[:, :2])
        return ranges

    @property
    def adapter_of(self) -> Array:
        """The slot of each packed token's adapter, NO_ADAPTER without one: int32 [T]; empty if no span has one."""
        each: Array = np.repeat(self.adapters, self.span_length) if len(self.adapters) else self.adapters
        return each

    @property
    def span_context(self) -> Array:
        """The number of computed tokens of each span's sequence after this step: int32 [S]."""
        context: Array = self.positions[np.cumsum(self.span_length) - 1] + np.int32(1)
        return context

    @property
    def can_advance(self) -> bool:
        """Whether each span has one token, and that one the only row."""
        return len(self.span_length) == len(self.tokens) == len(self.rows)

    @property
    def all_sample(self) -> bool:
        """Whether the rows choose tokens, and each span has some."""
        rows, stop = self.rows, np.cumsum(self.span_length, dtype=np.int32)
        return self.can_advance or (
            bool((rows.target == SAMPLE).all())
            and bool((np.diff(np.searchsorted(rows.token, stop), prepend=0) > 0).all())
        )

    def advance(self, sampled: Array, block_size: int) -> None:
        """Moves on by a token of each span, int32 [T]. While C decodes ahead, it does the same (c/decode_ahead.h)."""
        self.tokens[:] = sampled
        for counted in (self.positions, self.slots, self.rows.new_number):
            counted += 1
        entered = np.flatnonzero(self.positions % block_size == 0)
        if len(entered):
            self.slots[entered] = self.block_tables[entered, self.positions[entered] // block_size] * block_size


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start, stop) of one sequence, packed from index `first`."""

    first: int
    start: int
    stop: int
    block_table: Array


def ranges_within(ranges: Array, first: int, stop: int) -> list[tuple[slice, int]]:
    """Returns the rows among [first, stop), counted from `first`, and their slots, of ranges as in `adapter_rows`."""
    found = ((slice(max(0, low - first), min(high, stop) - first), slot) for low, high, slot in ranges.tolist())
    return [(rows, slot) for rows, slot in found if rows.start < rows.stop]


def spans_within(plan: RunningPlan, first: int, stop: int) -> list[TokenSpan]:
    """Returns the spans of a plan, cut to its packed tokens [first, stop) and numbered from `first`."""
    result = []
    offset = 0
    for length, table in zip(plan.span_length.tolist(), plan.block_tables, strict=True):
        low, high = max(first, offset), min(stop, offset + length)
        if low < high:
            begin = int(plan.positions[offset]) - offset
            result.append(TokenSpan(low - first, begin + low, begin + high, table))
        offset += length
    return result
