"""How many tokens a draft model proposes for each sample of a step: those that give most tokens per second.

With k proposals for each of m samples, of which a proposal comes true with chance a, a step gives a + a^2 + ... + a^k
tokens more for each. It takes k steps of the draft and m k rows of the model more. The costs are measured at the start
and corrected by the steps that follow; chances are learned from the proposals that were checked. Where no k pays, the
draft stops. What was learned loses its weight then, bit by bit, so that the draft is tried again.
"""

from collections.abc import Sequence
from typing import Final

from ..samples.draft_record import DraftRecord
from ..samples.sample import Sample
from .proposals import ProposalPolicy, RowCost, least_chance

_FIRST_CHANCE: Final = 0.7  # before any proposal was checked
_WEIGHT: Final = 8.0  # of the first guess, in tokens
_SHARED: Final = 3.0  # the weight of all samples' chance in that of one, in tokens
_MEMORY: Final = 0.995  # the part of their weight that tokens of all samples keep with every later one
_FORGET: Final = 0.002  # the part that is lost with a step without drafts
_GAIN: Final = 0.1  # of the newest duration
_MOST: Final = 4.0  # times as long as measured: a longer run of the draft was disturbed
_LEAST_REST: Final = 4  # new tokens that a sample may still have, or it ends before drafts pay,
_LAG_REST: Final = 32  # and one more for so many tokens that the draft has to read first


class DraftPolicy:
    """The choice of the number of drafts.

    Args:
        most: the largest number for a sample.
        context: the largest number of tokens that the draft reads.
        proposals: knows the cost of the model's rows, and what the wait for results costs.

    Attributes:
        row_cost: the duration of the draft's steps by their rows.
        scale: how many times as long they take as in the measurement.
    """

    def __init__(self, most: int, context: int, proposals: ProposalPolicy) -> None:
        self._most, self._context, self._proposals = most, context, proposals
        self.row_cost, self.scale = RowCost(), 1.0
        self._right, self._seen = _WEIGHT * _FIRST_CHANCE, _WEIGHT

    def choose(self, samples: Sequence[Sample], num_tokens: int) -> dict[Sample, int]:
        """Returns the numbers of proposals of the samples that shall get some.

        Args:
            samples: the decoding samples of the step.
            num_tokens: the tokens of the step without proposals, of prompts too.
        """
        least, gains = least_chance(len(samples), self._proposals.row_cost) if samples else 1.0, dict[Sample, float]()
        for sample in samples:
            if sample.output.draft is not None:
                self._learn(sample.output.draft)
                chance = self.chance(sample.output.draft)
                if chance > least and self._room(sample) > 0:
                    gains[sample] = chance
        count = self._best_count(list(gains.values()), len(samples), num_tokens) if gains else 0
        if not count:
            self._forget(samples)
            return {}
        return {sample: min(count, self._room(sample)) for sample in gains}

    def chance(self, record: DraftRecord) -> float:
        """Returns the chance that a sample's next proposal comes true."""
        return (record.right + _SHARED * self._right / self._seen) / (record.seen + _SHARED)

    def cost(self, num_samples: int) -> float:
        """Returns the time of a step of the draft for so many samples, as a part of that of the model's."""
        proposals = self._proposals
        return (
            self.scale * self.row_cost.seconds(num_samples) / (proposals.pace * proposals.row_cost.seconds(num_samples))
        )

    def observe(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Learns from the steps of the draft that made the proposals of one step of the model."""
        ratio = seconds / (num_steps * self.row_cost.seconds(num_rows))
        self.scale += _GAIN * (min(ratio, _MOST * self.scale) - self.scale)

    def _best_count(self, chances: Sequence[float], num_samples: int, num_tokens: int) -> int:
        """Returns the number of proposals for each of some samples with which steps give most tokens per second."""
        cost, pace = self._proposals.row_cost, self._proposals.pace
        alone, before = cost.seconds(num_samples), cost.seconds(num_tokens)
        of_draft = self.scale * self.row_cost.seconds(len(chances))
        expected, best, found, coming = float(num_samples), num_samples / (pace * alone), 0, list(chances)
        for count in range(1, self._most + 1):
            expected += sum(coming)
            coming = [each * chance for each, chance in zip(coming, chances, strict=True)]
            rows = cost.seconds(num_tokens + count * len(chances)) - before
            speed = expected / (pace * ((1 + self._proposals.overhead) * alone + rows) + count * of_draft)
            if speed > best:
                best, found = speed, count
        return found

    def _room(self, sample: Sample) -> int:
        """Returns how many proposals a sample can have; 0 where it ends before they pay."""
        assert sample.output.draft is not None, "it has drafts"
        rest = sample.output.max_tokens - sample.num_tokens - 1
        lag = sample.num_tokens - sample.output.draft.num_computed
        if not sample.output.tokens or rest < _LEAST_REST + lag // _LAG_REST:
            return 0
        return min(rest, self._context - sample.num_tokens)

    def _learn(self, record: DraftRecord) -> None:
        right, seen = record.learn()
        if seen:
            kept = _MEMORY**seen
            self._right, self._seen = kept * self._right + right, kept * self._seen + seen

    def _forget(self, samples: Sequence[Sample]) -> None:
        """Lets the chances come back to the first guess, slowly."""
        self._right += _FORGET * (_WEIGHT * _FIRST_CHANCE - self._right)
        self._seen += _FORGET * (_WEIGHT - self._seen)
        for sample in samples:
            if sample.output.draft is not None:
                sample.output.draft.forget(_FORGET)
