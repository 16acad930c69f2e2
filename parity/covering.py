"""Covering arrays: a small choice of combinations in which all values of any few axes still meet (no torch).

Greedy, one combination at a time, each the one that adds most (as AETG: Cohen et al., The AETG system, IEEE TSE 23(7),
1997), over a given list of combinations, so that constraints between axes cost nothing.
"""

from collections.abc import Callable, Sequence
from itertools import combinations


def covering_set(
    rows: Sequence[Sequence[object]], strength: int, cost: Callable[[int], float] = lambda index: 0.0
) -> list[int]:
    """Indexes of rows in which every tuple of `strength` columns' values occurs that occurs in any row; ascending.

    Fewer columns are covered with them. The same for the same input: among rows that add as much, the one of least
    `cost`, then the first.
    """
    numbers: dict[tuple[object, ...], int] = {}
    masks = [_mask(row, strength, numbers) for row in rows]
    missing = (1 << len(numbers)) - 1
    order = sorted(range(len(rows)), key=cost)
    chosen: list[int] = []
    while missing:
        best = max(order, key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(best)
        missing &= ~masks[best]
        order = [index for index in order if masks[index] & missing]
    return sorted(chosen)


def _mask(row: Sequence[object], strength: int, numbers: dict[tuple[object, ...], int]) -> int:
    """The tuples that a row holds, one bit each."""
    bits = 0
    for columns in combinations(range(len(row)), min(strength, len(row))):
        key = (columns, *(row[column] for column in columns))
        bits |= 1 << numbers.setdefault(key, len(numbers))
    return bits
