"""The worker's half of the persistent batch: slots with block tables, options, counts, and the tokens it sampled."""

from dataclasses import replace
from typing import Final

import numpy as np

from ....core.integers import ceil_div
from .sampled_rows import SampledRows
from .step_message import NextTokens, StepMessage
from .step_plan import OPTION_COLUMNS, Array, SamplingRow, SamplingRows, StepPlan, entries
from .token_counts import TokenCounts

# The columns of a slot; SamplingRows has them per row.
_OPTIONS: Final = {
    **dict.fromkeys(("num_top", "sample_index"), "<i4"),
    **OPTION_COLUMNS,
    "seed": "<u8",
}
Columns = tuple[Array, Array]
_NOTHING: Final[Columns] = (np.empty(0, np.int32), np.empty(0, np.int32))


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
        self._min_new = np.zeros(0, np.int32)
        self._has_entries = np.zeros(0, np.bool_)  # whether a slot has an entry in one of the three below
        self._options = {name: np.zeros(0, dtype) for name, dtype in _OPTIONS.items()}
        self._bias: dict[int, Columns] = {}
        self._early_bias: dict[int, Columns] = {}  # before the new token `min_new_tokens`
        self._counts: dict[int, TokenCounts] = {}
        self._sampled = SampledRows(*[np.empty(0, np.int32)] * 5)  # of the last plan
        self._places, self._given = _NOTHING  # their numbers among all rows, and their own tokens
        self._plan: StepPlan | None = None

    def plan(self, message: StepMessage | NextTokens) -> StepPlan:
        """Applies the changes of a step's message and returns the step's plan. `feed` must follow before the next.

        The plan of `NextTokens` is that of the step before, advanced in place, as long as no block is new.
        """
        if isinstance(message, StepMessage):
            self._plan = self._new_plan(message)
        else:
            assert self._plan is not None, "a first step has spans"
            if len(message.blocks):
                self._plan = self._with_blocks(self._plan, *message.blocks.T)
            self._advance(self._plan)
        return self._plan

    def _with_blocks(self, plan: StepPlan, span: Array, block: Array) -> StepPlan:
        """Returns a plan in which some spans have a new block each."""
        slots = self._sampled.slot  # each span has one row
        self._extend(slots[span], np.ones(len(span), np.int32), block)
        return replace(plan, block_tables=self._tables[slots, : self._num_blocks[slots].max()])

    def _advance(self, plan: StepPlan) -> None:
        """Moves a plan on by a token: each of its spans has one token, and the only row of it, a plain one."""
        self._last.take(self._sampled.slot, out=plan.tokens)
        for counted in (plan.positions, plan.slots, plan.span_context, plan.rows.new_number):
            counted += 1
        entered = np.flatnonzero(plan.positions % self._block_size == 0)
        if len(entered):
            block = plan.block_tables[entered, plan.positions[entered] // self._block_size]
            plan.slots[entered] = block * self._block_size

    def _new_plan(self, message: StepMessage) -> StepPlan:
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
        return StepPlan(
            tokens=tokens,
            positions=positions,
            slots=block * np.int32(self._block_size) + positions % self._block_size,
            span_length=length,
            span_context=start + length,
            block_tables=self._tables[slot, :widest],
            rows=self._rows(message.scored, tokens, sampled),
            twins=message.twins,
            forks=message.forks[:, 2:],
        )

    def feed(self, token_ids: Array) -> None:
        """Takes the tokens of all rows of the last plan; those after a wrong proposal do not count."""
        slots, sampled = self._sampled.slot, token_ids[self._places]
        if self._sampled.num_proposals.any():
            counts = self._sampled.come_true(sampled, self._given)
            slots, sampled = slots[counts], sampled[counts]
        self._last[slots] = sampled
        if self._counts:
            for slot, token in zip(slots.tolist(), sampled.tolist(), strict=True):
                if slot in self._counts:
                    self._counts[slot].add((token,))

    def _open(self, message: StepMessage) -> None:
        if not len(message.opened):
            return
        self._grow(int(message.opened["slot"].max()) + 1)
        bias = banned = counts = 0
        for opened in message.opened:
            slot, num_counts = int(opened["slot"]), int(opened["num_counts"])
            self._tables[slot], self._num_blocks[slot], self._min_new[slot] = 0, 0, opened["min_new_tokens"]
            for name, column in self._options.items():
                column[slot] = opened[name]
            biased = slice(bias, bias := bias + int(opened["num_bias"]))
            early = message.banned[banned : (banned := banned + int(opened["num_banned"]))]
            tokens, values = message.bias_token[biased], message.bias_value[biased]
            keep = ~np.isin(tokens, early)
            ban = np.full(len(early), -np.inf, np.float32)
            self._bias[slot] = (tokens, values)
            self._early_bias[slot] = (np.concatenate([tokens[keep], early]), np.concatenate([values[keep], ban]))
            self._counts.pop(slot, None)
            if num_counts >= 0:
                pairs = message.counts[counts : (counts := counts + num_counts)]
                self._counts[slot] = TokenCounts(dict(pairs.tolist()))
            self._has_entries[slot] = len(self._early_bias[slot][0]) > 0 or num_counts >= 0

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self._last)
        if missing <= 0:
            return
        self._tables = np.pad(self._tables, ((0, missing), (0, 0)))
        for name in ("_num_blocks", "_last", "_min_new", "_has_entries"):
            setattr(self, name, np.pad(getattr(self, name), (0, missing)))
        self._options = {name: np.pad(column, (0, missing)) for name, column in self._options.items()}

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
            **{name: column[sampled.slot] for name, column in self._options.items()},
            **self._entries(sampled, tokens),
        )
        self._places = np.arange(len(sampled.slot), dtype=np.int64)
        if len(scored):
            rows, self._places = rows.merge(SamplingRows.pack([SamplingRow(*row) for row in scored.tolist()]))
        self._sampled, self._given = sampled, tokens[sampled.token]
        return rows

    def _entries(self, sampled: SampledRows, tokens: Array) -> dict[str, Array]:
        slots = sampled.slot
        if not self._has_entries[slots].any():
            return {**entries("bias", (), np.float32), **entries("count", (), np.int32)}
        is_early = (sampled.number < self._min_new[slots]).tolist()
        names = slots.tolist()
        bias = [(self._early_bias if e else self._bias)[name] for name, e in zip(names, is_early, strict=True)]
        places = zip(names, sampled.token.tolist(), sampled.num_proposals.tolist(), strict=True)
        counts = [self._counted(name, tokens[token + 1 - proposed : token + 1]) for name, token, proposed in places]
        return {**entries("bias", bias, np.float32), **entries("count", counts, np.int32)}

    def _counted(self, slot: int, proposals: Array) -> Columns:
        """Returns the counts of a slot, with proposals that a row takes for its output."""
        counts = self._counts.get(slot)
        if counts is None:
            return _NOTHING
        return (counts.plus(proposals.tolist()) if len(proposals) else counts).columns()
