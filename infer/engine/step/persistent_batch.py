"""The worker's half of the persistent batch: slots with block tables, options, counts, and the tokens it sampled."""

from typing import Final

import numpy as np

from ....core.casts import Array
from ....core.integers import ceil_div
from .running_plan import NO_ADAPTER, RunningPlan
from .sampling_rows import OPTION_COLUMNS, SampledRows, SamplingRows
from .slot_entries import SlotEntries
from .step_message import GivenTokens, Message, StepMessage

# The columns of a slot; SamplingRows has them per row, but for the adapter.
_OPTIONS: Final = {
    **dict.fromkeys(("adapter", "num_top", "sample_index"), "<i4"),
    **OPTION_COLUMNS,
    "seed": "<u8",
}


class PersistentBatch:
    """The slots of a rank; they grow with the messages.

    Args:
        block_size: the number of tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((0, 16), np.int32)
        self._num_blocks = np.zeros(0, np.int32)  # of each table
        self._last = np.zeros(0, np.int32)  # the token that was sampled last
        self._options = {name: np.zeros(0, dtype) for name, dtype in _OPTIONS.items()}
        self._entries = SlotEntries()
        self._generation = 0  # of the last plan
        self._plan: RunningPlan | None = None  # the last one, if it can advance to the next
        # the slot of each span of the last step, and the position of its last token and the number of its new one
        self._spans: Array = np.empty((0, 3), np.int32)
        self._sampled = SampledRows(*[np.empty(0, np.int32)] * 5)  # its rows that sample
        self._places: Array = np.empty(0, np.int64)  # their numbers among all rows
        self._own: Array = np.empty(0, np.int32)  # their own tokens

    def plan(self, message: Message) -> RunningPlan:
        """Applies the changes of a step's message and returns the step's plan. `feed` must follow before the next.

        The plan of `NextTokens` is that of the step before, advanced; with new blocks it gets another generation.
        """
        if isinstance(message, GivenTokens):
            return self._new_plan(message.of_slots(self._spans[:, 0]))
        if isinstance(message, StepMessage):
            return self._new_plan(message)
        plan = self._plan
        if plan is None:
            return self._new_plan(self._following(message.blocks))
        if len(message.blocks):
            self.extend(message.blocks)
            plan.generation = self._generation = self._generation + 1
        plan.advance(self._last[self._spans[:, 0]], self._block_size)
        return plan

    def leave(self, newest: Array) -> None:
        """Takes the place of `feed` where a backend has gone on with `GivenTokens`, and left the last plan behind.

        Args:
            newest: the position, the number and the token that was sampled last, of each span: int32 [S, 3]; [0, 3]
                where the engine gives all tokens of the next step.
        """
        self._plan = None
        if len(newest):
            self._spans[:, 1:] = newest[:, :2]
            self._last[self._spans[:, 0]] = newest[:, 2]

    def _following(self, blocks: Array) -> StepMessage:
        """Returns the message that says what `NextTokens` with these blocks does."""
        slot, position, number = self._spans.T
        ones = np.ones_like(slot)
        spans = np.stack([position + 1, ones, number + 1, ones], axis=1)
        return GivenTokens(spans, -ones, np.insert(blocks, 1, 0, axis=1)).of_slots(slot)

    def extend(self, blocks: Array) -> None:
        """Takes new blocks of spans of the last plan, in their order, each behind its span: int32 [.., 2].

        The plan's tables get them, too. A backend that has them already goes on with the plan, whose generation stays.
        """
        if not len(blocks):
            return
        slots = self._spans[:, 0]
        ordered = blocks[np.argsort(blocks[:, 0], kind="stable")]
        span, num_added = np.unique(ordered[:, 0], return_counts=True)
        self._extend(slots[span], num_added, ordered[:, 1])
        if self._plan is not None:
            self._plan.block_tables = self._tables[slots, : self._num_blocks[slots].max()]

    def feed(self, token_ids: Array) -> None:
        """Takes the tokens of all rows of the last plan; those after a wrong proposal do not count."""
        slots, sampled = self._sampled.slot, token_ids[self._places]
        if self._sampled.num_proposals.any():
            counts = self._sampled.come_true(sampled, self._own)
            slots, sampled = slots[counts], sampled[counts]
        self._last[slots] = sampled
        self._entries.count(slots, sampled)

    def _new_plan(self, message: StepMessage) -> RunningPlan:
        self._generation += 1
        self._open(message)
        slot, start, length, given, number, num_rows, num_added, mask = message.spans.T.copy()
        if len(message.blocks):
            self._extend(slot, num_added, message.blocks)
        forked, place, _, own = message.forks.T
        self._tables[forked, place] = own
        first = np.cumsum(length, dtype=np.int32) - length
        positions, slot_of_token = start, slot
        if len(slot) and int(length.max()) > 1:
            within = np.arange(int(length.sum()), dtype=np.int32) - np.repeat(first, length)
            positions, slot_of_token = np.repeat(start, length) + within, np.repeat(slot, length)
        block = self._tables[slot_of_token, positions // self._block_size]
        widest = int(self._num_blocks[slot].max(initial=0))
        tokens = self._tokens(message.tokens, slot, first, length != given)
        sampled = SampledRows.of(np.stack([slot, first + length - num_rows, number, mask]), num_rows)
        self._spans, self._plan = np.stack([slot, start + length - np.int32(1), number], axis=1), None
        plan = RunningPlan(
            tokens=tokens,
            positions=positions,
            slots=block * np.int32(self._block_size) + positions % self._block_size,
            span_length=length,
            block_tables=self._tables[slot, :widest],
            rows=self._rows(message.scored, tokens, sampled),
            twins=message.twins,
            forks=message.forks[:, 2:],
            generation=self._generation,
            adapters=self._adapters_of(slot),
        )
        if plan.can_advance:
            self._plan = plan
        return plan

    def _adapters_of(self, slot: Array) -> Array:
        """Returns the adapters of slots; none at all if no slot has one."""
        found = self._options["adapter"][slot]
        return found if int(found.max(initial=NO_ADAPTER)) != NO_ADAPTER else found[:0]

    def _open(self, message: StepMessage) -> None:
        if not len(message.opened):
            return
        slot = message.opened["slot"]
        missing = int(slot.max()) + 1 - len(self._last)
        if missing > 0:
            self._tables = np.pad(self._tables, ((0, missing), (0, 0)))
            self._num_blocks, self._last = (np.pad(each, (0, missing)) for each in (self._num_blocks, self._last))
            self._options = {name: np.pad(column, (0, missing)) for name, column in self._options.items()}
        self._tables[slot], self._num_blocks[slot] = 0, 0
        for name, column in self._options.items():
            column[slot] = message.opened[name]
        self._entries.open(message)

    def _extend(self, slot: Array, num_added: Array, blocks: Array) -> None:
        total = self._num_blocks[slot] + num_added
        width = self._tables.shape[1]
        if int(total.max()) > width:
            wider = width * ceil_div(int(total.max()), width) * 2
            self._tables = np.pad(self._tables, ((0, 0), (0, wider - width)))
        first = self._num_blocks[slot] - (np.cumsum(num_added) - num_added)
        self._tables[np.repeat(slot, num_added), np.repeat(first, num_added) + np.arange(len(blocks))] = blocks
        self._num_blocks[slot] = total

    def _tokens(self, known: Array, slot: Array, first: Array, is_fed: Array) -> Array:
        """Returns the packed tokens: the known ones, and before them in some spans the token sampled last."""
        num_fed = int(is_fed.sum())
        if not num_fed:
            return known.copy()
        tokens = np.empty(len(known) + num_fed, np.int32)
        is_known = np.ones(len(tokens), np.bool_)
        is_known[first[is_fed]] = False
        tokens[~is_known], tokens[is_known] = self._last[slot[is_fed]], known
        return tokens

    def _rows(self, scored: Array, tokens: Array, sampled: SampledRows) -> SamplingRows:
        """Returns the rows of scored tokens and of those that sample, in the order of their tokens."""
        rows = SamplingRows(
            token=sampled.token,
            target=np.full(len(sampled.slot), -1, np.int32),
            new_number=sampled.number,
            mask=sampled.mask,
            **{name: column[sampled.slot] for name, column in self._options.items() if name != "adapter"},
            **self._entries.columns(sampled, tokens),
        )
        self._places = np.arange(len(sampled.slot), dtype=np.int64)
        if len(scored):
            rows, self._places = rows.merge(SamplingRows.scoring(scored))
        self._sampled, self._own = sampled, tokens[sampled.token]
        return rows
