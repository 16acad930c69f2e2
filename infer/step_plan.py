"""One step of the model as plain arrays: what the engine decides and every rank carries out.

A plan holds all that the workers need to know, so they keep no state about requests: preemption, abort and a sequence's
end are nothing to tell them. Letters: T packed tokens, S spans (one per sequence), R rows of logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SAMPLE: Final = -1  # as a row's target: choose a token
NO_LOGPROBS: Final = -1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A position whose logits are wanted, either to choose the next token or to score a known one.

    Attributes:
        token: index among the step's packed tokens.
        target: SAMPLE, or the token id to score.
        num_top: alternatives to report, or NO_LOGPROBS.
        sample_index, new_number: counter of the noise: which of the n samples, which of its new tokens.
        bias: token id -> what is added to its logit; -inf bans it.
        counts: tokens under penalties -> their number in the output (0: only in the prompt).
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
    counts: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """All rows of a step, column by column; `bias_*` and `count_*` are lists of (row, token id, value)."""

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
    bias_row: Array  # int32
    bias_token: Array  # int32
    bias_value: Array  # float32
    count_row: Array  # int32
    count_token: Array  # int32
    count_value: Array  # int32

    def __len__(self) -> int:
        return len(self.token)

    @staticmethod
    def pack(rows: Sequence[SamplingRow]) -> "SamplingRows":
        """Lays rows out as columns."""
        bias = [(i, token, value) for i, row in enumerate(rows) for token, value in (row.bias or {}).items()]
        counts = [(i, token, value) for i, row in enumerate(rows) for token, value in (row.counts or {}).items()]
        columns = {
            name: np.array([getattr(row, name) for row in rows], dtype)
            for name, dtype in (
                ("token", np.int32),
                ("target", np.int32),
                ("num_top", np.int32),
                ("temperature", np.float32),
                ("top_k", np.int32),
                ("top_p", np.float32),
                ("min_p", np.float32),
                ("repetition_penalty", np.float32),
                ("presence_penalty", np.float32),
                ("frequency_penalty", np.float32),
                ("seed", np.uint64),
                ("sample_index", np.int32),
                ("new_number", np.int32),
            )
        }
        return SamplingRows(
            **columns,
            bias_row=_column(bias, 0, np.int32),
            bias_token=_column(bias, 1, np.int32),
            bias_value=_column(bias, 2, np.float32),
            count_row=_column(counts, 0, np.int32),
            count_token=_column(counts, 1, np.int32),
            count_value=_column(counts, 2, np.int32),
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    The tokens of a span follow one another in `tokens`; spans lie in the order of `span_length`.

    Attributes:
        slots: where each token's key and value go: block * block_size + offset.
        span_length: tokens of each span in this step.
        span_context: tokens of its sequence once they are computed, these included.
        block_tables: [S, most blocks], padded with the null block 0.
    """

    tokens: Array  # int32 [T]
    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    span_length: Array  # int32 [S]
    span_context: Array  # int32 [S]
    block_tables: Array  # int32 [S, B]
    rows: SamplingRows

    def arrays(self) -> dict[str, Array]:
        """For the wire between the engine and its workers."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        return own | {f"rows.{f.name}": getattr(self.rows, f.name) for f in fields(SamplingRows)}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> "StepPlan":
        """What `arrays` came from."""
        rows = SamplingRows(**{f.name: arrays[f"rows.{f.name}"] for f in fields(SamplingRows)})
        return StepPlan(**{f.name: arrays[f.name] for f in fields(StepPlan) if f.name != "rows"}, rows=rows)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What rank 0 answers, one entry per row of the plan; `top_*` are [R, most alternatives asked for].

    Attributes:
        finite: 0 where the logits held NaN or infinity; nothing else of that row means anything then.
        rank: 1 + number of tokens more probable than the row's token.
    """

    token_ids: Array  # int32 [R]
    finite: Array  # uint8 [R]
    logprob: Array  # float32 [R]
    rank: Array  # int32 [R]
    top_ids: Array  # int32 [R, K]
    top_logprobs: Array  # float32 [R, K]

    def arrays(self) -> dict[str, Array]:
        """For the wire between a worker and the engine."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> "SamplerOutput":
        """What `arrays` came from."""
        return SamplerOutput(**{f.name: arrays[f.name] for f in fields(SamplerOutput)})


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence: `tokens` [start, stop) of it, packed from index `first`."""

    first: int
    start: int
    stop: int
    block_table: Array


def spans_within(plan: StepPlan, first: int, stop: int) -> list[TokenSpan]:
    """The spans of a plan, cut to its packed tokens [first, stop) and numbered from there."""
    result = []
    offset = 0
    for length, context, table in zip(plan.span_length, plan.span_context, plan.block_tables, strict=True):
        low, high = max(first, offset), min(stop, offset + int(length))
        if low < high:
            begin = int(context) - int(length) - offset
            result.append(TokenSpan(low - first, begin + low, begin + high, table))
        offset += int(length)
    return result


def _column(triples: Sequence[tuple[int, int, float]], index: int, dtype: type[np.generic]) -> Array:
    return np.array([triple[index] for triple in triples], dtype)
