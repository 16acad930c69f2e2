"""Covering arrays: a small subset of combinations that still has every combination of values of any few axes.

The greedy algorithm of AETG (Cohen et al., The AETG system, IEEE TSE 23(7), 1997) repeatedly takes the combination that
adds most. It chooses from a given list of combinations, so constraints between axes cost nothing.
"""

from collections.abc import Callable, Sequence
from itertools import combinations


def covering_set(
    rows: Sequence[Sequence[object]], strength: int, cost: Callable[[int], float] = lambda index: 0.0
) -> list[int]:
    """Returns ascending indexes of rows that together have each tuple of values of `strength` columns of any row.

    The rows then also have each tuple of fewer columns. The result is deterministic: among rows that add equally much,
    the algorithm takes the first one of the least `cost`.
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
    """Returns the set of tuples in a row as a bit mask; `numbers` assigns a bit to each tuple."""
    bits = 0
    for columns in combinations(range(len(row)), min(strength, len(row))):
        key = (columns, *(row[column] for column in columns))
        bits |= 1 << numbers.setdefault(key, len(numbers))
    return bits
