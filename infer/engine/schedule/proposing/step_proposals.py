"""The proposals of a step: those that are sure, then those that pay, as far as there are blocks and budget for them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..block_manager import BlockManager
from ..samples.sample import UNKNOWN, Sample, ScheduledChunk, Source
from ..step_cost import StepBudget
from .draft_policy import DraftPolicy
from .forced import forced_tokens
from .proposals import ProposalPolicy


class StepProposals:
    """The proposals for the samples of a scheduler.

    Attributes:
        drafts: chooses the number of proposals of a draft model; None without one.

    Args:
        policy: chooses proposals by their chances.
        blocks: the blocks of all samples.
        running: the running samples.
    """

    def __init__(self, policy: ProposalPolicy, blocks: BlockManager, running: Sequence[Sample]) -> None:
        self._policy, self._blocks, self._running = policy, blocks, running
        self.drafts: DraftPolicy | None = None

    @property
    def await_tokens(self) -> bool:
        """Whether the next step shall be planned when the tokens of the one before are known: a draft goes on there."""
        decoding = [sample for sample in self._running if sample.num_uncomputed == 1]
        return self.drafts is not None and bool(self.drafts.choose(decoding, len(decoding)))

    def beside(self, decoding: Sequence[ScheduledChunk], budget: StepBudget) -> list[ScheduledChunk]:
        """Returns the chunks of decoding samples with proposals behind their tokens, which take part of the budget."""
        samples = [chunk.sample for chunk in decoding]
        chunks = self._with_each(decoding, forced_tokens(samples), Source.CONSTRAINT, budget)
        if self.drafts is not None:
            return self._with_drafts(chunks, self.drafts, budget)
        return self._with_each(chunks, self._policy.choose(samples, budget.num_reserved), Source.TEXT, budget)

    def _with_each(
        self,
        chunks: Sequence[ScheduledChunk],
        proposals: Mapping[Sample, Sequence[int]],
        source: Source,
        budget: StepBudget,
    ) -> list[ScheduledChunk]:
        """Returns chunks with the proposals for their samples."""
        if not proposals:  # as in most steps, which this keeps short
            return [*chunks]
        return [self._with(each, proposals.get(each.sample, ()), source, budget) for each in chunks]

    def _with_drafts(
        self, chunks: Sequence[ScheduledChunk], drafts: DraftPolicy, budget: StepBudget
    ) -> list[ScheduledChunk]:
        """Returns chunks with room for the proposals of a draft, which begins behind known tokens.

        Where `await_tokens` wanted none, no token is known.
        """
        if not any(_is_known(chunk) for chunk in chunks):
            return [*chunks]
        counts = drafts.choose([chunk.sample for chunk in chunks], budget.num_reserved)
        return [
            self._with(each, [UNKNOWN] * counts.get(each.sample, 0), Source.DRAFT, budget)
            if not each.proposals and _is_known(each)
            else each
            for each in chunks
        ]

    def _with(
        self, chunk: ScheduledChunk, proposals: Sequence[int], source: Source, budget: StepBudget
    ) -> ScheduledChunk:
        """Returns a decoding sample's chunk with proposals, as many as there are blocks and budget left for.

        Blocks of proposals that do not come true stay with the sample, for the tokens that come instead.
        """
        if not proposals:
            return chunk
        most = min(len(proposals), self._blocks.room(chunk.sample, len(self._running)))
        count = budget.rest(chunk.stop, most)
        if count <= 0:
            return chunk
        budget.reserve(chunk.stop, count)
        self._blocks.grow(chunk.sample, count)
        return replace(chunk, length=chunk.length + count, proposals=tuple(proposals[:count]), source=source)


def _is_known(chunk: ScheduledChunk) -> bool:
    return chunk.sample.output.tokens[-1:] != [UNKNOWN]
