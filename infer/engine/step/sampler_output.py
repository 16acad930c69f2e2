"""The results of a step, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from struct import Struct
from typing import Final

import numpy as np

from ....core.casts import Array

NUM_CANDIDATES: Final = 8
_HEAD: Final = Struct("<3i")  # rows; alternatives of each, -1 without log-probabilities; candidates of each
# Columns that no row requests, for decoded outputs: the engine reads none of them.
_NO_LOGPROBS: Final = np.empty(0, np.float32)
_NO_RANKS: Final = np.empty(0, np.int32)
_NO_IDS: Final = np.empty((0, 0), np.int32)
_NO_VALUES: Final = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The answer of rank 0 to a plan, with one entry per row.

    Attributes:
        token_ids: the token that was chosen or scored.
        finite: 0 if the logits held NaN or infinity; the other values of that row are then meaningless.
        logprob: the token's log-probability, if requested.
        rank: 1 + the number of tokens more probable than the row's token, if requested.
        top_ids, top_logprobs: the most probable tokens; K is the largest number that a row requests.
        candidates: of rows WITH_CANDIDATES the tokens in the order in which they would be chosen, -1 behind the last
            one and in other rows; C is 0 without such rows. The first one that a mask allows is the token that would
            be chosen under that mask.
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
        is_scored = bool(self.rank.any())
        head = _HEAD.pack(len(self.token_ids), self.top_ids.shape[1] if is_scored else -1, self.candidates.shape[1])
        scores = (self.logprob, self.rank, self.top_ids, self.top_logprobs) if is_scored else ()
        return head + b"".join(each.tobytes() for each in (self.token_ids, self.finite, *scores, self.candidates))

    @staticmethod
    def decode(data: bytes | bytearray) -> "SamplerOutput":
        """Returns the output that `encode` wrote; columns that no row requests are empty."""
        num_rows, most, num_candidates = _HEAD.unpack_from(data)
        offset = _HEAD.size

        def take(code: str, width: int = 1) -> Array:
            nonlocal offset
            column = np.frombuffer(data, code, num_rows * width, offset)
            offset += column.nbytes
            return column

        columns = [take("<i4"), take("u1")]
        if most >= 0:
            columns += [take("<f4"), take("<i4")]
            columns += [take(code, most).reshape(num_rows, most) for code in ("<i4", "<f4")]
        else:
            columns += [_NO_LOGPROBS, _NO_RANKS, _NO_IDS, _NO_VALUES]
        columns.append(take("<i4", num_candidates).reshape(num_rows, num_candidates) if num_candidates else _NO_IDS)
        return SamplerOutput(*columns)

    @staticmethod
    def of_tokens(token_ids: Array, finite: Array, candidates: Array | None = None) -> "SamplerOutput":
        """Returns the output of rows that request no log-probabilities; without candidates C is 0."""
        num_rows = len(token_ids)
        logprob, rank = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
        none, top_logprobs = np.empty((num_rows, 0), np.int32), np.empty((num_rows, 0), np.float32)
        return SamplerOutput(
            token_ids, finite, logprob, rank, none, top_logprobs, none if candidates is None else candidates
        )

    def replaced(self, rows: Array, others: "SamplerOutput") -> "SamplerOutput":
        """Returns these answers, of tokens alone, with those of others in some rows: int64 [N]."""
        columns: dict[str, Array] = {}
        for f in fields(SamplerOutput):
            values = getattr(others, f.name)
            fill = -1 if f.name == "candidates" else 0
            columns[f.name] = np.full((len(self.token_ids), *values.shape[1:]), fill, values.dtype)
            if f.name in ("token_ids", "finite"):
                columns[f.name][:] = getattr(self, f.name)
            columns[f.name][rows] = values
        return SamplerOutput(**columns)

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
