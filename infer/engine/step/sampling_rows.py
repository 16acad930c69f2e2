"""The rows of logits of a step, each with its options: one by one, and as columns, which the samplers read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from ....core.casts import Array
from ..request.sampling_params import OPTIONS
from .token_counts import TokenCounts

SAMPLE: Final = -1  # the target of a row whose token the sampler chooses
NO_LOGPROBS: Final = -1
NO_MASK: Final = -1
WITH_CANDIDATES: Final = -2  # the mask of a row whose candidates the engine chooses among
# The columns of the samplers' options, and the types of their values.
OPTION_COLUMNS: Final = {name: each.column for name, each in OPTIONS.items() if each.column is not None}
_COLUMNS: Final = {
    **dict.fromkeys(("token", "target", "num_top", "sample_index", "new_number", "mask"), "<i4"),
    **OPTION_COLUMNS,
    "seed": "<u8",
}
_NOTHING: Final = (np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A position whose logits the step computes, to choose the next token or to score a known one.

    Attributes without an entry are those of SamplingParams.

    Attributes:
        token: the index of the position among the step's packed tokens.
        target: SAMPLE, or the token id to score.
        num_top: the number of alternatives to report, or NO_LOGPROBS.
        seed: the seed of the noise.
        sample_index, new_number: the counter of the noise: the number of the sample and of its new token.
        bias: token id -> the value to add to its logit; -inf bans the token.
        counts: the tokens under penalties, as they are when the row is packed.
        mask: the number of its mask among the step's masks; NO_MASK: all tokens are allowed; WITH_CANDIDATES:
            all are, and the best ones are reported. Then neither filters nor log-probabilities are requested.
    """

    token: int
    target: int = SAMPLE
    num_top: int = NO_LOGPROBS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    sample_index: int = 0
    new_number: int = 0
    bias: Mapping[int, float] | None = None
    counts: TokenCounts | None = None
    mask: int = NO_MASK


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """All rows of a step as columns; `bias_*` and `count_*` are lists of (row, token id, value)."""

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

    def masked(self, rows: Array) -> "SamplingRows":
        """Returns the same rows: those of these numbers, int32 [M], have the masks 0 to M - 1, the others none."""
        mask = np.full_like(self.mask, NO_MASK)
        mask[rows] = np.arange(len(rows), dtype=np.int32)
        return replace(self, mask=mask)

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
    def pack(rows: Sequence[SamplingRow]) -> "SamplingRows":
        """Converts rows to columns."""
        bias = [_bias_columns(row.bias) if row.bias else _NOTHING for row in rows]
        counts = [row.counts.columns() if row.counts else _NOTHING for row in rows]
        columns = {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in _COLUMNS.items()}
        return SamplingRows(
            **columns,
            **entries("bias", bias, np.float32),
            **entries("count", counts, np.int32),
        )


def _bias_columns(bias: Mapping[int, float]) -> tuple[Array, Array]:
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


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
