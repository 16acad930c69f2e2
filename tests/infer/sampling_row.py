"""Rows of logits one by one, with all of their options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tk.core.casts import Array
from tk.infer.engine.step.sampling_rows import COLUMNS, NO_LOGPROBS, NO_MASK, SAMPLE, SamplingRows, ScoredRow, entries
from tk.infer.engine.step.slot_entries import TokenCounts

NOTHING = (np.empty(0, np.int32), np.empty(0, np.int32))


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

    @staticmethod
    def of(row: ScoredRow) -> "SamplingRow":
        """Returns the row that scores a token, whose options do not count: they are zeros."""
        return SamplingRow(*row, top_p=0.0, repetition_penalty=0.0)


def pack(rows: Sequence[SamplingRow]) -> SamplingRows:
    """Converts rows to columns."""
    bias = [_bias_columns(row.bias) if row.bias else NOTHING for row in rows]
    counts = [row.counts.columns() if row.counts else NOTHING for row in rows]
    columns = {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in COLUMNS.items()}
    return SamplingRows(**columns, **entries("bias", bias, np.float32), **entries("count", counts, np.int32))


def _bias_columns(bias: Mapping[int, float]) -> tuple[Array, Array]:
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
