"""How many tokens a draft model proposes for each sample of a step: those that give most tokens per second.

With k proposals for each of m samples, of which a proposal comes true with chance a, a step gives a + a^2 + ... + a^k
tokens more for each. It takes k steps of the draft and m k rows of the model more. The costs are measured at the start
and corrected by the steps that follow; chances are learned from the proposals that were checked. Where no k pays, the
draft rests.

Rest is not for ever, because texts change. The policy owes the time that drafts took beyond the tokens that they gave,
and each step without drafts pays back a hundredth of its own. When nothing is owed, one sample gets drafts on trial,
before which old chances lose their weight: if those come true, drafts go on. So all trials together take a hundredth of
the time, whatever they cost.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from ..samples.draft_record import DraftRecord
from ..samples.sample import Sample
from .proposals import ProposalPolicy, RowCost

_FIRST_CHANCE: Final = 0.7  # before any proposal was checked
_WEIGHT: Final = 8.0  # of the first guess, in tokens
_SHARED: Final = 3.0  # the weight of all samples' chance in that of one, in tokens
_MEMORY: Final = 0.995  # the part of their weight that tokens of all samples keep with every later one
_GAIN: Final = 0.1  # of the newest duration
_PAID_BACK: Final = 0.01  # the part of a step without drafts
_PATIENCE: Final = 16.0  # steps, whose time is owed at most before drafts rest that seem to pay
_TRIED: Final = 4  # proposals of a trial, at most
_KEPT: Final = 2.0  # the weight of a sample's earlier tokens in a trial
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
        self._owed = 0.0  # seconds
        self._resting = 0  # the number of samples with which drafts rest; 0: they do not
        self._are_out = False  # whether proposals were chosen whose results are not learned yet

    def choose(self, samples: Sequence[Sample], num_tokens: int) -> dict[Sample, int]:
        """Returns the numbers of proposals of the samples that shall get some; {} for a step without drafts.

        Args:
            samples: the decoding samples of the step.
            num_tokens: the tokens of the step without proposals, of prompts too.
        """
        has_news = self._are_out
        if has_news:
            self._learn(samples)
        if self._owed > 0 and self._resting == len(samples) and not has_news:
            self._owed -= _PAID_BACK * self._plain_seconds(len(samples))
            return {}
        rooms = {sample: room for sample in samples if (room := self._room(sample)) > 0}
        chosen = self._paying(rooms, len(samples), num_tokens)
        is_over = self._owed > _PATIENCE * self._plain_seconds(len(samples))
        if rooms:
            self._resting = 0 if chosen and not is_over else len(samples)
        if self._resting:
            chosen = self._on_trial(rooms) if self._owed <= 0 else {}
        self._are_out = bool(chosen)
        return chosen

    def chance(self, record: DraftRecord) -> float:
        """Returns the chance that a sample's next proposal comes true."""
        return (record.right + _SHARED * self._right / self._seen) / (record.seen + _SHARED)

    def cost(self, num_samples: int) -> float:
        """Returns the time of a step of the draft for so many samples, as a part of that of the model's."""
        return self.scale * self.row_cost.seconds(num_samples) / self._plain_seconds(num_samples)

    def observe(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Learns from the steps of the draft that made the proposals of one step of the model."""
        ratio = seconds / (num_steps * self.row_cost.seconds(num_rows))
        self.scale += _GAIN * (min(ratio, _MOST * self.scale) - self.scale)

    def spend(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Records the time that the draft took for one step of the model.

        What it reads before counts in a trial alone: otherwise it lasts for many steps.
        """
        made = min(seconds, _MOST * self.scale * num_steps * self.row_cost.seconds(num_rows))
        self._owed += seconds if self._resting else made

    def _paying(self, rooms: Mapping[Sample, int], num_samples: int, num_tokens: int) -> dict[Sample, int]:
        """Returns as many proposals of samples as give most tokens per second, none of samples that seldom gain."""
        least = self._proposals.row_cost.least_chance(num_samples)
        gains = {sample: chance for sample in rooms if (chance := self.chance(_record(sample))) > least}
        count = self._best_count(list(gains.values()), num_samples, num_tokens) if gains else 0
        return {sample: min(count, rooms[sample]) for sample in gains} if count else {}

    def _on_trial(self, rooms: Mapping[Sample, int]) -> dict[Sample, int]:
        """Returns proposals for the sample of which the draft has least to read; earlier tokens lose their weight."""
        if not rooms:
            return {}
        sample = min(rooms, key=_lag)
        _record(sample).weaken(_KEPT)
        kept = min(1.0, _WEIGHT / self._seen)
        self._right, self._seen = kept * self._right, kept * self._seen
        return {sample: min(_TRIED, self._most, rooms[sample])}

    def _best_count(self, chances: Sequence[float], num_samples: int, num_tokens: int) -> int:
        """Returns the number of proposals for each of some samples with which steps give most tokens per second."""
        of_draft, alone = self.scale * self.row_cost.seconds(len(chances)), self._plain_seconds(num_samples)
        expected, best, found, coming = float(num_samples), num_samples / alone, 0, list(chances)
        for count in range(1, self._most + 1):
            expected += sum(coming)
            coming = [each * chance for each, chance in zip(coming, chances, strict=True)]
            more = self._more_seconds(num_samples, num_tokens, count * len(chances))
            speed = expected / (alone + more + count * of_draft)
            if speed > best:
                best, found = speed, count
        return found

    def _plain_seconds(self, num_samples: int) -> float:
        """Returns the time of a step without proposals."""
        return self._proposals.pace * self._proposals.row_cost.seconds(num_samples)

    def _more_seconds(self, num_samples: int, num_tokens: int, num_proposals: int) -> float:
        """Returns the time that a step of the model takes more with proposals, beside that of the draft."""
        cost, overhead = self._proposals.row_cost, self._proposals.overhead
        rows = cost.seconds(num_tokens + num_proposals) - cost.seconds(num_tokens)
        return self._proposals.pace * (overhead * cost.seconds(num_samples) + rows)

    def _room(self, sample: Sample) -> int:
        """Returns how many proposals a sample can have; 0 where it gets none, or ends before they pay."""
        if sample.output.draft is None or not sample.output.tokens:
            return 0
        rest = sample.output.max_tokens - sample.num_tokens - 1
        if rest < _LEAST_REST + _lag(sample) // _LAG_REST:
            return 0
        return min(rest, self._context - sample.num_tokens)

    def _learn(self, samples: Sequence[Sample]) -> None:
        """Learns how many proposals of the newest step came true, and what they have gained."""
        num_proposed = num_right = 0
        for sample in samples:
            if sample.output.draft is not None:
                proposed, right, seen = sample.output.draft.learn()
                kept = _MEMORY**seen
                self._right, self._seen = kept * self._right + right, kept * self._seen + seen
                num_proposed, num_right = num_proposed + proposed, num_right + right
        if num_proposed:
            width, gained = len(samples), num_right * self._plain_seconds(len(samples)) / len(samples)
            self._owed = max(0.0, self._owed + self._more_seconds(width, width, num_proposed) - gained)


def _record(sample: Sample) -> DraftRecord:
    assert sample.output.draft is not None, "it has drafts"
    return sample.output.draft


def _lag(sample: Sample) -> int:
    """Returns how many tokens of a sample the draft has to read."""
    return sample.num_tokens - _record(sample).num_computed
