"""The rows of logits of a step with their options, as columns, which the samplers read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

import numpy as np

from ....core.casts import Array
from ..request.sampling_params import OPTIONS

SAMPLE: Final = -1  # the target of a row whose token the sampler chooses
NO_LOGPROBS: Final = -1
NO_MASK: Final = -1
WITH_CANDIDATES: Final = -2  # the mask of a row whose candidates the engine chooses among
# The columns of the samplers' options, and the types of their values.
OPTION_COLUMNS: Final = {name: each.column for name, each in OPTIONS.items() if each.column is not None}
COLUMNS: Final = {
    **dict.fromkeys(("token", "target", "num_top", "sample_index", "new_number", "mask"), "<i4"),
    **OPTION_COLUMNS,
    "seed": "<u8",
}


class ScoredRow(NamedTuple):
    """A row that scores a known token, without other options.

    Attributes:
        token: the index of its position among the step's packed tokens.
        target: the token id to score.
        num_top: the number of alternatives to report, or NO_LOGPROBS.
    """

    token: int
    target: int
    num_top: int = NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """All rows of a step as columns; `bias_*` and `count_*` are lists of (row, token id, value).

    Attributes without an entry are those of SamplingParams.

    Attributes:
        token: the index of the position among the step's packed tokens, whose logits the step computes.
        target: SAMPLE, or the token id to score: then options do not count.
        num_top: the number of alternatives to report, or NO_LOGPROBS.
        seed: the seed of the noise.
        sample_index, new_number: the counter of the noise: the number of the sample and of its new token.
        mask: the number of its mask among the step's masks; NO_MASK: all tokens are allowed; WITH_CANDIDATES: all are,
            and the best ones are reported. Then neither filters nor log-probabilities are requested.
        bias_value: the value to add to a logit; -inf bans the token.
        count_value: how often a token under penalties has occurred before the row.
    """

    token: Array  # int32 [R]
    target: Array  # int32 [R]
    num_top: Array  # int32 [R]
    temperature: Array  # float32 [R]
    top_k: Array  # int32 [R]
    top_p: Array  # float32 [R]
    min_p: Array  # float32 [R]
    repetition_penalty: Array  # float32 [R]
    presence_penalty: Array  # float32 [R]
    frequency_penalty: Array  # float32 [R]
    seed: Array  # uint64 [R]
    sample_index: Array  # int32 [R]
    new_number: Array  # int32 [R]
    mask: Array  # int32 [R]
    bias_row: Array  # int32
    bias_token: Array  # int32
    bias_value: Array  # float32
    count_row: Array  # int32
    count_token: Array  # int32
    count_value: Array  # int32

    def __len__(self) -> int:
        return len(self.token)

    @property
    def are_masked(self) -> bool:
        """Whether one of the rows has a mask."""
        return bool((self.mask >= 0).any())

    @property
    def have_candidates(self) -> bool:
        """Whether one of the rows reports candidates."""
        return bool((self.mask == WITH_CANDIDATES).any())

    @property
    def are_plain(self) -> Array:
        """Which rows are greedy, or samples at a temperature, filtered or not, and ask for nothing more: bool [R].

        The others have a bias, a penalty, a mask or candidates, or ask for log-probabilities.
        """
        found: Array = (self.target == SAMPLE) & (self.mask == NO_MASK) & (self.num_top == NO_LOGPROBS)
        for changed in (self.bias_row, self.count_row):
            found[changed] = False
        return found

    def masked(self, rows: Array) -> "SamplingRows":
        """Returns the same rows: those of these numbers, int32 [M], have the masks 0 to M - 1, the others none."""
        mask = np.full_like(self.mask, NO_MASK)
        mask[rows] = np.arange(len(rows), dtype=np.int32)
        return replace(self, mask=mask)

    def taken(self, numbers: Array) -> "SamplingRows":
        """Returns the rows of these numbers, which ascend: int64 [N]; they are numbered from 0."""
        found: dict[str, Array] = {}
        for kind in ("bias", "count"):
            row = getattr(self, f"{kind}_row")
            chosen = np.isin(row, numbers)
            found[f"{kind}_row"] = np.searchsorted(numbers, row[chosen]).astype(np.int32)
            found |= {f"{kind}_{name}": getattr(self, f"{kind}_{name}")[chosen] for name in ("token", "value")}
        rows = {f.name: getattr(self, f.name)[numbers] for f in fields(self) if f.name not in found}
        return SamplingRows(**rows, **found)

    def part(self, first: int, stop: int) -> "SamplingRows":
        """Returns rows [first, stop), numbered from 0."""
        if first == 0 and stop >= len(self):
            return self
        found: dict[str, Array] = {}
        for kind in ("bias", "count"):
            row = getattr(self, f"{kind}_row")
            chosen = (row >= first) & (row < stop)
            found[f"{kind}_row"] = row[chosen] - np.int32(first)
            found |= {f"{kind}_{name}": getattr(self, f"{kind}_{name}")[chosen] for name in ("token", "value")}
        rows = {f.name: getattr(self, f.name)[first:stop] for f in fields(self) if f.name not in found}
        return SamplingRows(**rows, **found)

    def merge(self, others: "SamplingRows") -> tuple["SamplingRows", Array]:
        """Returns these rows and others, which have no bias and no counts, in the order of their tokens.

        The second result has the numbers of these rows among all: int64 [len(self)], ascending.
        """
        order = np.argsort(np.concatenate([self.token, others.token]), kind="stable")
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        columns = {f.name: np.concatenate([getattr(self, f.name), getattr(others, f.name)]) for f in fields(self)}
        for name in columns:
            if name in ("bias_row", "count_row"):
                columns[name] = place[columns[name]]
            elif not name.startswith(("bias_", "count_")):
                columns[name] = columns[name][order]
        return SamplingRows(**columns), place[: len(self)].astype(np.int64)

    @staticmethod
    def scoring(scored: Array) -> "SamplingRows":
        """Returns rows that score known tokens, from the values of `ScoredRow`: int32 [R, 3]."""
        zeros = {name: np.zeros(len(scored), dtype) for name, dtype in COLUMNS.items()}
        token, target, num_top = scored.T
        rows = zeros | {"token": token, "target": target, "num_top": num_top, "mask": zeros["mask"] + np.int32(NO_MASK)}
        return SamplingRows(**rows, **entries("bias", (), np.float32), **entries("count", (), np.int32))


def entries(name: str, of_rows: Sequence[tuple[Array, Array]], dtype: type[np.generic]) -> dict[str, Array]:
    """Returns the columns of a list of (row, token id, value), from the token ids and values of each row.

    Args:
        name: the start of the columns' names, "bias" or "count".
        of_rows: the token ids and the values of each row, both one-dimensional.
        dtype: the type of the values.
    """
    if not of_rows:
        none = np.empty(0, np.int32)
        return {f"{name}_row": none, f"{name}_token": none, f"{name}_value": np.empty(0, dtype)}
    lengths = [len(tokens) for tokens, _ in of_rows]
    return {
        f"{name}_row": np.repeat(np.arange(len(of_rows), dtype=np.int32), lengths),
        f"{name}_token": np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in of_rows)]),
        f"{name}_value": np.concatenate([np.empty(0, dtype), *(values for _, values in of_rows)], dtype=dtype),
    }


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows in the order of their tokens; those of a slot stand together.

    Attributes:
        slot: the slot of each row.
        token: the row's token among the step's packed tokens.
        number: the number of the new token that it samples.
        mask: the number of its mask, NO_MASK or WITH_CANDIDATES.
        num_proposals: how many proposals stand between the slot's last token and the row's new one.
    """

    slot: Array  # int32 [N]
    token: Array  # int32 [N]
    number: Array  # int32 [N]
    mask: Array  # int32 [N]
    num_proposals: Array  # int32 [N]

    @staticmethod
    def of(first_rows: Array, num_rows: Array) -> "SampledRows":
        """Returns the rows of spans.

        Args:
            first_rows: slot, token, number and mask of the first row of each span: int32 [4, S]. Masks of a span's
                rows have consecutive numbers.
            num_rows: the number of rows of each: int32 [S].
        """
        spans = np.flatnonzero(num_rows)
        first_rows, num_rows = first_rows[:, spans], num_rows[spans]
        if int(num_rows.max(initial=1)) == 1:
            slot, token, number, mask = np.ascontiguousarray(first_rows)
            return SampledRows(slot, token, number, mask, np.zeros(len(spans), np.int32))
        first = np.cumsum(num_rows, dtype=np.int32) - num_rows
        within = np.arange(int(num_rows.sum()), dtype=np.int32) - np.repeat(first, num_rows)
        slot, token, number, mask = np.repeat(first_rows, num_rows, axis=1)
        mask = np.where(mask >= 0, mask + within, mask)  # each row has one of its own
        return SampledRows(slot, token + within, number + within, mask, within)

    def come_true(self, sampled: Array, given: Array) -> Array:
        """Returns which rows count, because the samples before them equal the proposals: bool [N].

        Args:
            sampled: the tokens that the rows sampled: int32 [N].
            given: the rows' own tokens, which are proposals but for the first of each slot: int32 [N].
        """
        is_wrong = self.num_proposals > 0
        is_wrong[1:] &= sampled[:-1] != given[1:]
        num_wrong = np.cumsum(is_wrong)
        found: Array = num_wrong == num_wrong[np.arange(len(num_wrong)) - self.num_proposals]
        return found
