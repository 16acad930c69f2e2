"""A step from its schedule to its results: the message to the workers and the rows of logits that come back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....core.casts import Array
from ....core.errors import TkError
from ..grammar.grammar import ALL_TOKENS, Matcher
from ..options import MAX_HEAD_ROWS
from ..step.sampler_output import SamplerOutput
from ..step.sampling_rows import ScoredRow
from .batch_writer import BatchWriter
from .live_request import LiveRequest
from .samples.sample import Sample, ScheduledChunk, Source, Status


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A row of logits of a step: it scores the token of `scored`, or chooses the sample's token at `position`.

    If it chooses a token after a proposal, of `source`, it counts only if the token before it is `proposal`. The tokens
    `sure` come before its own, the first of them at `position`.
    """

    request: LiveRequest
    sample: Sample
    position: int
    scored: ScoredRow | None = None
    proposal: int | None = None
    source: Source = Source.TEXT
    sure: tuple[int, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether its sample has ended."""
        return self.request.is_over or self.sample.status is Status.FINISHED

    @property
    def is_void(self) -> bool:
        """Whether its result is of no use: its sample has ended, or a proposal before it did not come true."""
        if self.proposal is None:
            return self.request.is_over or self.sample.status is Status.FINISHED
        sample = self.sample
        return self.has_ended or sample.num_tokens != self.position or sample.output.tokens[-1] != self.proposal


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of rows.

    Attributes:
        rows: the numbers of the rows: int32 [M].
        words: the masks: uint32 [M, W].
    """

    rows: Array
    words: Array


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the workers compute.

    Attributes:
        message: its encoded message.
        chunks: the chunks that it computes.
        rows: its rows of logits, in the order of its results.
        with_candidates: the numbers of the rows with candidates, among which a constraint chooses.
        failed: why the constraints of rows cannot go on, by their numbers; their masks are void.
        is_free: whether no row has a constraint.
    """

    message: bytes
    chunks: Sequence[ScheduledChunk]
    rows: Sequence[WantedRow]
    with_candidates: Sequence[int] = ()
    failed: dict[int, TkError] = field(default_factory=dict)
    is_free: bool = False

    @property
    def has_proposals(self) -> bool:
        """Whether the number of tokens that it gives a sample is not known before its results."""
        return any(chunk.proposals for chunk in self.chunks)

    def masks(self) -> Masks | None:
        """Makes the masks of its rows, in their order, when all tokens before the step are known; None without any.

        Rows with candidates get none; their constraints look ahead.
        """
        if self.is_free:
            return None
        matchers = self._matchers()
        for index in self.with_candidates:
            if not self.rows[index].has_ended:
                matchers[index].look_ahead()
        rows = [index for index in matchers if index not in self.with_candidates]
        return self.masks_of(rows) if rows else None

    def masks_of(self, rows: Sequence[int]) -> Masks:
        """Makes the masks of rows with constraints. One of an ended sample gets a mask of all tokens."""
        masks, matchers = list[Array](), self._matchers()
        for index in rows:
            matcher = matchers[index]
            mask = np.full(matcher.num_words, ALL_TOKENS)
            if not self.rows[index].has_ended:
                matcher.write_mask(mask)
                if (error := matcher.error) is not None:
                    self.failed[index] = error
            masks.append(mask)
        return Masks(np.array(rows, np.int32), np.stack(masks))

    def choose(self, result: SamplerOutput) -> tuple[Array, list[int]]:
        """Chooses the tokens of rows with candidates.

        Returns:
            The tokens of all rows, int32 [R], and the rows none of whose candidates may follow: they need masks.
        """
        tokens, refused = result.token_ids.tolist(), list[int]()
        finite, candidates, matchers = result.finite.tolist(), result.candidates.tolist(), self._matchers()
        for index in self.with_candidates:
            row = self.rows[index]
            if row.has_ended or not finite[index]:
                continue
            if row.proposal not in (None, tokens[index - 1]) and index - 1 not in refused:
                continue  # the proposal did not come true
            token = matchers[index].first_allowed(candidates[index])
            if token is None:
                refused.append(index)
            else:
                tokens[index] = token
        return np.array(tokens, np.int32), refused

    def _matchers(self) -> dict[int, Matcher]:
        """Returns the states in which constraints choose the tokens of rows, by the numbers of the rows.

        All tokens before the step are known. A row after a proposal chooses as if it came true.
        """
        found = dict[int, Matcher]()
        for index, row in enumerate(self.rows):
            matcher = row.sample.output.matcher
            if row.scored is None and matcher is not None:
                if row.proposal is not None and not row.has_ended:
                    matcher = found[index - 1].after(row.proposal)
                for token in () if row.has_ended else row.sure:
                    matcher = matcher.after(token)
                found[index] = matcher
        return found


def prepare_step(planned: Sequence[tuple[ScheduledChunk, LiveRequest]], batch: BatchWriter) -> StepInFlight:
    """Returns the step of scheduled chunks, each with its request, and sends the first event of those that begin."""
    rows: list[WantedRow] = []
    scored: list[ScoredRow] = []
    first, is_free = 0, True
    for chunk, request in planned:
        sample = chunk.sample
        is_free = is_free and sample.output.matcher is None
        if chunk.start < sample.num_prompt:
            for row in request.begin_chunk(chunk, first):
                scored.append(row)
                rows.append(WantedRow(request, sample, 0, row))
            request.deliver()
        if chunk.is_last:
            rows.append(WantedRow(request, sample, sample.num_tokens, sure=chunk.sure))
            for i, proposal in enumerate(() if chunk.sure else chunk.proposals, sample.num_tokens + 1):
                rows.append(WantedRow(request, sample, i, proposal=proposal, source=chunk.source))
        first += chunk.length
    chunks = [chunk for chunk, _ in planned]
    keeps_logits = len(rows) <= MAX_HEAD_ROWS  # until all tokens are chosen
    with_candidates = [
        i
        for i, row in enumerate(() if is_free else rows)
        if keeps_logits and row.scored is None and row.sample.output.has_candidates
    ]
    message = batch.write(chunks, scored, keeps_logits).encode()
    return StepInFlight(message, chunks, rows, with_candidates, is_free=is_free)
