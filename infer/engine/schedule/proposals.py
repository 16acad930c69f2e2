"""The choice of a step's proposals: those that make it give more tokens per second, as far as can be expected.

A step of n samples takes T(n) and gives n tokens. With k proposals it takes T(n + k), and gives as many tokens more
as proposals come true. T is flat where the weights' bytes take the time and steep where products do: one sample has
room for proposals that seldom come true, a wide batch for none.
"""

from collections.abc import Sequence
from typing import Final

from .costs.row_cost import RowCost
from .samples.sample import Sample

_SURE: Final = 0.9  # where only larger chances pay, proposals gain too little to look for them


def choose_proposals(
    samples: Sequence[Sample], num_tokens: int, cost: RowCost, overhead: float
) -> dict[Sample, list[int]]:
    """Returns the proposals that a step shall compute; of a sample without any there may be an empty list.

    Args:
        samples: the decoding samples of the step.
        num_tokens: the tokens of the step without proposals, of prompts too.
        cost: the duration of steps by their tokens.
        overhead: see `PlanningCost`.
    """
    if all(sample.proposer is None for sample in samples):
        return {}
    least = least_chance(len(samples), cost)
    if least > _SURE:
        return {}  # samples that make no proposals need not even read their tokens
    found, chances = dict[Sample, list[int]](), list[list[float]]()
    for sample in samples:
        if sample.proposer is not None:
            new = sample.tokens(len(sample.proposer), sample.num_known)
            num_unknown, most = sample.num_tokens - sample.num_known, sample.output.max_tokens - sample.num_tokens - 1
            found[sample], expected = sample.proposer.propose(new, num_unknown, most)
            chances.append([chance for chance in expected if chance >= least])
    counts = worthwhile(chances, num_tokens, cost, len(samples), overhead)
    return {sample: tokens[:count] for (sample, tokens), count in zip(found.items(), counts, strict=True)}


def worthwhile(
    chances: Sequence[Sequence[float]], num_tokens: int, cost: RowCost, num_sequences: int, overhead: float
) -> list[int]:
    """Returns how many proposals of each sample a step computes: the most tokens per second are expected then.

    Args:
        chances: the chances of the proposals of each sample that makes any, which never grow.
        num_tokens: the tokens of the step without proposals.
        cost: the duration of steps by their tokens.
        num_sequences: the number of all decoding samples.
        overhead: see `PlanningCost`.
    """
    best_first = sorted(((chance, i) for i, each in enumerate(chances) for chance in each), reverse=True)
    alone, before = cost.seconds(num_sequences), cost.seconds(num_tokens)
    expected: float = num_sequences
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


def least_chance(num_sequences: int, cost: RowCost) -> float:
    """Returns the chance below which proposals never pay in a step of so many samples, however many they are."""
    alone = cost.seconds(num_sequences)
    slopes = ((cost.seconds(num_sequences + count) - alone) / count for count in range(1, cost.horizon + 1))
    return min(slopes) * num_sequences / alone
