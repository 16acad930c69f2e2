"""The choice of a step's proposals: those that make it give more tokens per second, as far as can be expected.

A step of n sequences takes T(n) and gives n tokens. With k proposals it takes T(n + k), and gives as many tokens more
as proposals come true. T is flat where the weights' bytes take the time and steep where products do: one sequence has
room for proposals that seldom come true, a wide batch for none.
"""

from collections.abc import Sequence as List
from typing import Final

from .costs.row_cost import RowCost
from .samples.sequence import Sequence

_SURE: Final = 0.9  # where only larger chances pay, proposals gain too little to look for them


def choose_proposals(
    sequences: List[Sequence], num_tokens: int, cost: RowCost, overhead: float
) -> dict[Sequence, list[int]]:
    """Returns the proposals that a step shall compute; of a sequence without any there may be an empty list.

    Args:
        sequences: the decoding sequences of the step.
        num_tokens: the tokens of the step without proposals, of prompts too.
        cost: the duration of steps by their tokens.
        overhead: see `PlanningCost`.
    """
    if all(sequence.speculation is None for sequence in sequences):
        return {}
    least = least_chance(len(sequences), cost)
    if least > _SURE:
        return {}  # sequences that make no proposals need not even read their tokens
    found, chances = dict[Sequence, list[int]](), list[list[float]]()
    for sequence in sequences:
        if sequence.speculation is not None:
            new = sequence.tokens(len(sequence.speculation), sequence.num_known)
            num_unknown, most = sequence.num_tokens - sequence.num_known, sequence.max_tokens - sequence.num_tokens - 1
            found[sequence], expected = sequence.speculation.propose(new, num_unknown, most)
            chances.append([chance for chance in expected if chance >= least])
    counts = worthwhile(chances, num_tokens, cost, len(sequences), overhead)
    return {sequence: tokens[:count] for (sequence, tokens), count in zip(found.items(), counts, strict=True)}


def worthwhile(
    chances: List[List[float]], num_tokens: int, cost: RowCost, num_sequences: int, overhead: float
) -> list[int]:
    """Returns how many proposals of each sequence a step computes: the most tokens per second are expected then.

    Args:
        chances: the chances of the proposals of each sequence that makes any, which never grow.
        num_tokens: the tokens of the step without proposals.
        cost: the duration of steps by their tokens.
        num_sequences: the number of all decoding sequences.
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
    """Returns the chance below which proposals never pay in a step of so many sequences, however many they are."""
    alone = cost.seconds(num_sequences)
    slopes = ((cost.seconds(num_sequences + count) - alone) / count for count in range(1, cost.horizon + 1))
    return min(slopes) * num_sequences / alone
