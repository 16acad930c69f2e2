"""A step from its schedule to its results: the message to the workers and the rows of logits that come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import TkError
from ..constraints.grammar import ALL_TOKENS
from .batch_writer import BatchWriter
from .live_request import LiveRequest
from .scheduled_chunk import ScheduledChunk
from .scheduler import Scheduler
from .sequence import UNKNOWN, Status
from .sequence import Sequence as Sample
from .step_plan import Array, SamplerOutput, SamplingRow


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A row of logits of a step: it scores the token of `scored`, or chooses the sequence's token at `position`.

    If it chooses a token after a proposal, it counts only if the token before it is `proposal`.
    """

    request: LiveRequest
    sequence: Sample
    position: int
    scored: SamplingRow | None = None
    proposal: int | None = None

    @property
    def is_void(self) -> bool:
        """Whether its result is of no use: its sequence has ended, or a proposal before it did not come true."""
        sequence = self.sequence
        if self.request.is_over or sequence.status is Status.FINISHED:
            return True
        return self.proposal is not None and (
            sequence.num_tokens != self.position or sequence.output[-1] != self.proposal
        )


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the workers compute.

    Attributes:
        message: its encoded message.
        chunks: the chunks that it computes.
        rows: its rows of logits, in the order of its results.
    """

    message: bytes
    chunks: Sequence[ScheduledChunk]
    rows: Sequence[WantedRow]

    @property
    def has_proposals(self) -> bool:
        """Whether the number of tokens that it gives a sequence is not known before its results."""
        return any(chunk.proposals for chunk in self.chunks)

    def masks(self) -> tuple[Array, list[tuple[LiveRequest, TkError]]] | None:
        """Makes the masks of its rows, in their order, when all tokens before the step are known; None without any.

        Returns:
            uint32 [M, W], and the requests whose constraints failed. A row of an ended sample gets a mask of all
            tokens.
        """
        rows = [row for row in self.rows if row.scored is None and row.sequence.matcher is not None]
        if not rows:
            return None
        masks: list[Array] = []
        failed: list[tuple[LiveRequest, TkError]] = []
        for row in rows:
            matcher = row.sequence.matcher
            assert matcher is not None, "it is one of those with a constraint"
            mask = np.full(matcher.num_words, ALL_TOKENS)
            if row.sequence.status is not Status.FINISHED:
                matcher.write_mask(mask)
                if (error := matcher.error) is not None:
                    failed.append((row.request, error))
            masks.append(mask)
        return np.stack(masks), failed


def prepare_step(
    chunks: Sequence[ScheduledChunk], live: Mapping[tuple[str, str], LiveRequest], batch: BatchWriter
) -> StepInFlight:
    """Returns a step of scheduled chunks, and sends the first event of requests that begin."""
    rows: list[WantedRow] = []
    scored: list[SamplingRow] = []
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        request = live[sequence.key]
        for row in request.want(chunk, first):
            scored.append(row)
            rows.append(WantedRow(request, sequence, 0, row))
        if chunk.is_last:
            rows.append(WantedRow(request, sequence, sequence.num_tokens))
            for i, proposal in enumerate(chunk.proposals, sequence.num_tokens + 1):
                rows.append(WantedRow(request, sequence, i, proposal=proposal))
        if chunk.start < sequence.num_prompt:
            request.deliver()
        first += chunk.length
    return StepInFlight(batch.write(chunks, scored).encode(), chunks, rows)


def record_step(step: StepInFlight, scheduler: Scheduler) -> None:
    """Records that a step was sent: its tokens count as computed, and sequences that sample get an UNKNOWN token."""
    for chunk in step.chunks:
        scheduler.advance(chunk)
    for row in step.rows:
        if row.scored is None and row.proposal is None:
            row.sequence.append(UNKNOWN)


def take_token(row: WantedRow, result: SamplerOutput, index: int, scheduler: Scheduler) -> None:
    """Gives a sequence the token of a row that is not void, at `index` of the results; ends it if it is complete."""
    if row.proposal is not None:
        scheduler.accept(row.sequence)
    scheduler.activity.new_token()
    if row.request.take(row.sequence, row.position, result, index):
        scheduler.finish(row.sequence)
