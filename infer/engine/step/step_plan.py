"""The plan of one step as plain arrays, which every rank makes from the engine's message and its backend carries out.

A plan is complete, so backends keep no state about requests. Letters: T packed tokens, S spans (one per sequence), R
rows of logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..request.sampling_params import OPTIONS
from .token_counts import TokenCounts

Array = npt.NDArray[Any]

SAMPLE: Final = -1  # the target of a row whose token the sampler chooses
NO_LOGPROBS: Final = -1
NO_MASK: Final = -1
ASKED: Final = -2  # the mask of a row whose candidates the engine chooses among
NUM_CANDIDATES: Final = 8
# The columns of the samplers' options, and the types of their values.
OPTION_COLUMNS: Final = {name: each.column for name, each in OPTIONS.items() if each.column is not None}
_COLUMNS: Final = {
    **dict.fromkeys(("token", "target", "num_top", "sample_index", "new_number", "mask"), "<i4"),
    **OPTION_COLUMNS,
    "seed": "<u8",
}
_RESULT_HEAD: Final = Struct("<3i")  # rows; alternatives of each, -1 without log-probabilities; candidates of each
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
        mask: the number of its mask among the step's masks; NO_MASK: all tokens are allowed; ASKED: all are, and the
            best ones are reported as candidates. Then neither filters nor log-probabilities are requested.
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
    def are_asked(self) -> bool:
        """Whether one of the rows reports candidates."""
        return bool((self.mask == ASKED).any())

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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The computation of one step.

    The tokens of a span are consecutive in `tokens`; the spans have the order of `span_length`. A step that only goes
    on with the next tokens has the plan of the step before, which has advanced: `tokens`, `positions`, `slots`,
    `span_context` and `rows.new_number` have other values in the same memory.

    Attributes:
        tokens: the token ids.
        positions: the position of each token in its sequence.
        slots: the cache slot of each token's key and value: block * block_size + offset.
        span_length: the number of tokens of each span.
        span_context: the number of computed tokens of the span's sequence after this step.
        block_tables: the blocks of each span's sequence, padded with the null block 0.
        rows: the rows of logits to compute.
        twins: blocks that get a twin, and the numbers of their twins (see `CacheShape.num_twins`).
        forks: blocks, and others that get their content before anything is stored, cleared or read.
    """

    tokens: Array  # int32 [T]
    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    span_length: Array  # int32 [S]
    span_context: Array  # int32 [S]
    block_tables: Array  # int32 [S, B]
    rows: SamplingRows
    twins: Array = field(default_factory=lambda: np.empty((0, 2), np.int32))  # int32 [.., 2]
    forks: Array = field(default_factory=lambda: np.empty((0, 2), np.int32))  # int32 [.., 2]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The answer of rank 0 to a plan, with one entry per row.

    Attributes:
        token_ids: the token that was chosen or scored.
        finite: 0 if the logits held NaN or infinity; the other values of that row are then meaningless.
        logprob: the token's log-probability, if requested.
        rank: 1 + the number of tokens more probable than the row's token, if requested.
        top_ids, top_logprobs: the most probable tokens; K is the largest number that a row requests.
        candidates: of ASKED rows the tokens in the order in which they would be chosen, -1 behind the last one and in
            other rows; C is 0 without such rows. The first one that a mask allows is the token that would be chosen
            under that mask.
    """

    token_ids: Array  # int32 [R]
    finite: Array  # uint8 [R]
    logprob: Array  # float32 [R]
    rank: Array  # int32 [R]
    top_ids: Array  # int32 [R, K]
    top_logprobs: Array  # float32 [R, K]
    candidates: Array  # int32 [R, C]

    def encode(self) -> bytes:
        """Returns the output as bytes: int32 R, K, C and the columns; K is -1 if no row requests a log-probability."""
        scored, asked = bool(self.rank.any()), self.candidates.shape[1]
        head = _RESULT_HEAD.pack(len(self.token_ids), self.top_ids.shape[1] if scored else -1, asked)
        columns = [self.logprob, self.rank, self.top_ids, self.top_logprobs] if scored else []
        columns += [self.candidates] if asked else []
        return b"".join((head, self.token_ids.tobytes(), self.finite.tobytes(), *(each.tobytes() for each in columns)))

    @staticmethod
    def decode(data: bytes | bytearray) -> "SamplerOutput":
        """Returns the output that `encode` wrote; where none was requested, it has no log-probabilities."""
        num_rows, most, asked = _RESULT_HEAD.unpack_from(data)
        token_ids = np.frombuffer(data, "<i4", num_rows, _RESULT_HEAD.size)
        offset = _RESULT_HEAD.size + token_ids.nbytes
        finite = np.frombuffer(data, np.uint8, num_rows, offset)
        offset += finite.nbytes
        candidates = None
        if asked:
            candidates = np.frombuffer(data, "<i4", num_rows * asked, len(data) - 4 * num_rows * asked)
            candidates = candidates.reshape(num_rows, asked)
        if most < 0:
            return SamplerOutput.of_tokens(token_ids, finite, candidates)
        columns = list[Array]()
        for code, width in (("<f4", 1), ("<i4", 1), ("<i4", most), ("<f4", most)):
            columns.append(np.frombuffer(data, code, num_rows * width, offset))
            offset += columns[-1].nbytes
        logprob, rank, *top = columns
        top_ids, top_logprobs = (each.reshape(num_rows, most) for each in top)
        candidates = np.empty((num_rows, 0), np.int32) if candidates is None else candidates
        return SamplerOutput(token_ids, finite, logprob, rank, top_ids, top_logprobs, candidates)

    @staticmethod
    def of_tokens(token_ids: Array, finite: Array, candidates: Array | None = None) -> "SamplerOutput":
        """Returns the output of rows that request no log-probabilities; without candidates C is 0."""
        num_rows = len(token_ids)
        logprob, rank = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
        none, top_logprobs = np.empty((num_rows, 0), np.int32), np.empty((num_rows, 0), np.float32)
        return SamplerOutput(
            token_ids, finite, logprob, rank, none, top_logprobs, none if candidates is None else candidates
        )

    @staticmethod
    def join(parts: Sequence["SamplerOutput"]) -> "SamplerOutput":
        """Joins the outputs of consecutive rows; those with fewer alternatives or candidates are padded."""
        columns: dict[str, Array] = {}
        for f in fields(SamplerOutput):
            values = [getattr(part, f.name) for part in parts]
            if values[0].ndim == 2:
                most, fill = max(each.shape[1] for each in values), -1 if f.name == "candidates" else 0
                values = [np.pad(each, ((0, 0), (0, most - each.shape[1])), constant_values=fill) for each in values]
            columns[f.name] = np.concatenate(values)
        return SamplerOutput(**columns)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start, stop) of one sequence, packed from index `first`."""

    first: int
    start: int
    stop: int
    block_table: Array


def spans_within(plan: StepPlan, first: int, stop: int) -> list[TokenSpan]:
    """Returns the spans of a plan, cut to its packed tokens [first, stop) and numbered from `first`."""
    result = []
    offset = 0
    for length, context, table in zip(plan.span_length, plan.span_context, plan.block_tables, strict=True):
        low, high = max(first, offset), min(stop, offset + int(length))
        if low < high:
            begin = int(context) - int(length) - offset
            result.append(TokenSpan(low - first, begin + low, begin + high, table))
        offset += int(length)
    return result


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
