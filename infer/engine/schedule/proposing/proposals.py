"""The choice of a step's proposals: those that make it give more tokens per second, as far as can be expected.

A step of n samples takes T(n) and gives n tokens. With k proposals it takes T(n + k), and gives as many tokens more
as proposals come true. T is flat where the weights' bytes take the time and steep where products do: one sample has
room for proposals that seldom come true, a wide batch for none.

A step without proposals is planned and sent while the workers compute the one before. One with proposals waits for the
results of the one before, and the next one waits for its results: then the workers wait for the engine. On a small
model that is a large part of a step, on a large one nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final

from ..samples.sample import Sample

_SURE: Final = 0.9  # where only larger chances pay, proposals gain too little to look for them
# Without a measurement: a step of up to 8 rows takes as long as one of 1.
_ROW_GUESS: Final[Mapping[int, float]] = MappingProxyType({1: 1.0, 8: 1.0, 16: 2.0})
_OVERHEAD_GUESS: Final = 0.05
_GAIN: Final = 0.1  # of the newest step
_FORGET: Final = 0.002  # with each step without proposals: without a new observation the guess comes back
_MOST: Final = 1.0  # a step that took longer was disturbed


class RowCost:
    """The duration of steps of few tokens each of which has a row of logits, by their number.

    `StepCost` is a straight line, right for prompts. Decoding is not one: the first rows come with the weights that one
    row reads too, and kernels compute rows in groups. So this is a curve through steps that the engine measures at its
    start, straight between them and behind them. Only ratios of its values count, which other work on the machine and
    the length of the context change little. A step of few rows that took longer than one of more was disturbed, and
    counts as long as that.

    Args:
        measured: seconds, above 0, by the number of rows, at least 1.

    Attributes:
        horizon: the largest measured number of rows.
    """

    def __init__(self, measured: Mapping[int, float] = _ROW_GUESS) -> None:
        falling = sorted(measured, reverse=True)
        knots = list(zip(falling, accumulate((measured[rows] for rows in falling), min), strict=True))[::-1]
        (least, seconds), self.horizon = knots[0], falling[0]
        self._seconds = [seconds] * (least + 1)
        for (rows, seconds), (more, longer) in pairwise(knots):
            self._seconds += [seconds + (longer - seconds) * i / (more - rows) for i in range(1, more - rows + 1)]
        half = self.horizon // 2
        self._slope = (self._seconds[-1] - self._seconds[half]) / (self.horizon - half)
        self._least: dict[int, float] = {}  # by the number of samples

    def seconds(self, num_rows: int) -> float:
        """Returns the duration of a step of so many rows."""
        if num_rows <= self.horizon:
            return self._seconds[num_rows]
        return self._seconds[-1] + self._slope * (num_rows - self.horizon)

    def least_chance(self, num_samples: int) -> float:
        """Returns the chance below which proposals never pay in a step of so many samples, however many they are."""
        found = self._least.get(num_samples)
        if found is None:
            alone = self.seconds(num_samples)
            slopes = ((self.seconds(num_samples + count) - alone) / count for count in range(1, self.horizon + 1))
            found = self._least[num_samples] = min(slopes) * num_samples / alone
        return found


class ProposalPolicy:
    """The choice, by costs that it learns.

    Attributes:
        row_cost: the duration of steps by their tokens.
        overhead: the time that a step with proposals takes more than its rows do, as a part of a step without any.
        forgets: whether that comes back to a guess while there are no proposals, so that they are tried again.
    """

    def __init__(self) -> None:
        self.row_cost = RowCost()
        self.overhead, self.forgets = _OVERHEAD_GUESS, True
        self._plain: float | None = None  # the time from results to results of a step without, as a part of its rows'

    @property
    def pace(self) -> float:
        """The time of a step without proposals, as a part of what `row_cost` says; 1 as long as it is not known."""
        return 1.0 if self._plain is None else self._plain

    def observe(self, num_rows: int, period: float, has_proposals: bool) -> None:
        """Learns from a step of decoding.

        Args:
            period: the time from the results of the step before to its own, in seconds.
            has_proposals: whether any of its rows is a proposal.
        """
        ratio, plain = period / self.row_cost.seconds(num_rows), self._plain
        if not has_proposals:
            self._plain = ratio if plain is None else plain + _GAIN * (min(ratio, 2 * plain) - plain)
            self.overhead += _FORGET * self.forgets * (_OVERHEAD_GUESS - self.overhead)
        elif plain is not None:
            seen = min(max(ratio / plain - 1, 0.0), _MOST)
            self.overhead += _GAIN * (seen - self.overhead)

    def choose(self, samples: Sequence[Sample], num_tokens: int) -> dict[Sample, list[int]]:
        """Returns the proposals that a step shall compute; of a sample without any there may be an empty list.

        Args:
            samples: the decoding samples of the step.
            num_tokens: the tokens of the step without proposals, of prompts too.
        """
        if all(sample.proposer is None for sample in samples):
            return {}
        least = self.row_cost.least_chance(len(samples))
        if least > _SURE:
            return {}  # samples that make no proposals need not even read their tokens
        found, chances = dict[Sample, list[int]](), list[list[float]]()
        for sample in samples:
            if sample.proposer is not None:
                new = sample.tokens(len(sample.proposer), sample.num_known)
                num_unknown = sample.num_tokens - sample.num_known
                most = sample.output.max_tokens - sample.num_tokens - 1
                found[sample], expected = sample.proposer.propose(new, num_unknown, most)
                chances.append([chance for chance in expected if chance >= least])
        counts = worthwhile(chances, num_tokens, self.row_cost, len(samples), self.overhead)
        return {sample: tokens[:count] for (sample, tokens), count in zip(found.items(), counts, strict=True)}


def worthwhile(
    chances: Sequence[Sequence[float]], num_tokens: int, cost: RowCost, num_samples: int, overhead: float
) -> list[int]:
    """Returns how many proposals of each sample a step computes: the most tokens per second are expected then.

    Args:
        chances: the chances of the proposals of each sample that makes any, which never grow.
        num_tokens: the tokens of the step without proposals.
        cost: the duration of steps by their tokens.
        num_samples: the number of all decoding samples.
        overhead: see `ProposalPolicy`.
    """
    best_first = sorted(((chance, i) for i, each in enumerate(chances) for chance in each), reverse=True)
    alone, before = cost.seconds(num_samples), cost.seconds(num_tokens)
    expected: float = num_samples
    most, num_kept = expected / alone, 0
    for count, (chance, _) in enumerate(best_first, 1):
        expected += chance
        speed = expected / ((1 + overhead) * alone + cost.seconds(num_tokens + count) - before)
        if speed > most:
            most, num_kept = speed, count
    counts = [0] * len(chances)
    for _, i in best_first[:num_kept]:
        counts[i] += 1
    return counts
