"""Covering arrays: few valid rows of a space that together have every combination of values of chosen groups of axes.

The algorithm is that of AETG (Cohen et al., The AETG system: an approach to testing based on combinatorial design, IEEE
TSE 23(7), 1997): each next row is the best of some candidates, and a candidate begins with a tuple that is missing and
takes for one axis after another, in random order, the value that adds most tuples. Two things are added. A
candidate is built by the space's exact search, so a tuple is left out only if no valid row has it. At the end, rows
that the others make superfluous are removed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Final

from .space import Row, Space, bits

CANDIDATES: Final = 10  # AETG has 50; here more of them find no smaller sets


def covering_rows(
    space: Space, groups: Iterable[Sequence[str]], cost: Callable[[Row], float] = lambda row: 0.0
) -> list[Row]:
    """Returns valid rows that together have, for each group of axes, each tuple of their values of any valid row.

    They then also have each tuple of some of a group's axes. The result is deterministic; of candidates that add
    equally many tuples, one of the least `cost` is taken.
    """
    masks, random = [space.mask(group) for group in groups], Random(0)
    missing = MissingTuples(space, masks)
    chosen: list[int] = []
    while missing.tuples:
        seeds = list(missing.tuples)
        candidates = {_candidate(space, missing, random.choice(seeds), random) for _ in range(CANDIDATES)}
        best = max(sorted(candidates), key=lambda row: (missing.gain(row), -cost(space.row(row))))
        missing.remove(best)
        chosen.append(best)
    kept = _necessary(chosen, masks, lambda row: cost(space.row(row)))
    return [space.row(row) for row in sorted(kept, key=lambda row: list(bits(row)))]


class MissingTuples:
    """The tuples of values that valid rows have and the chosen rows lack.

    Args:
        space: says which rows are valid.
        masks: for each group of axes, all their values.

    Attributes:
        tuples: the missing tuples, each a set of one value of each axis of a group.
    """

    def __init__(self, space: Space, masks: Sequence[int]) -> None:
        self.masks = masks
        self.tuples = _possible_tuples(space, masks)
        self._others = {  # by axis: the other axes of each group with it, and their number
            column: [(mask ^ column, space.num_axes(mask) - 1) for mask in masks if mask & column]
            for column in space.columns
        }
        self._last: dict[int, int] = {}  # by all values of a tuple but one: the values that complete it
        for values in self.tuples:
            for bit in bits(values):
                self._last[values ^ bit] = self._last.get(values ^ bit, 0) | bit

    def gain(self, row: int) -> int:
        """Returns the number of missing tuples that a row has."""
        return sum(row & mask in self.tuples for mask in self.masks)

    def gains(self, decided: int, column: int, options: int) -> dict[int, int]:
        """Returns for each value of `options`, all of one axis, the number of missing tuples that it completes.

        Args:
            decided: the values of a row's other axes, as far as they are decided.
            column: all values of the axis.
        """
        result = dict.fromkeys(bits(options), 0)
        for others, count in self._others[column]:
            values = decided & others
            if values.bit_count() == count:
                for bit in bits(self._last.get(values, 0) & options):
                    result[bit] += 1
        return result

    def remove(self, row: int) -> None:
        """Removes the tuples of a row."""
        for mask in self.masks:
            values = row & mask
            if values in self.tuples:
                del self.tuples[values]
                for bit in bits(values):
                    self._last[values ^ bit] ^= bit


def _possible_tuples(space: Space, masks: Sequence[int]) -> dict[int, None]:
    """Returns the tuples that valid rows have; a tuple is refused only once the search has tried every row with it."""
    found: dict[int, None] = {}
    for mask in masks:
        for values in _products([column for column in space.columns if column & mask]):
            if values not in found:
                row = next(space.solutions(space.all & ~mask | values, space.in_order), None)
                found.update(dict.fromkeys(row & each for each in masks) if row is not None else {})
    return found


def _products(columns: Sequence[int]) -> Iterator[int]:
    if not columns:
        yield 0
        return
    for rest in _products(columns[1:]):
        for bit in bits(columns[0]):
            yield bit | rest


def _candidate(space: Space, missing: MissingTuples, seed: int, random: Random) -> int:
    """Returns a valid row that has the tuple `seed`, built value by value for the most missing tuples."""
    columns = random.sample(space.columns, len(space.columns))

    def branches(values: int) -> Iterator[int]:
        decided = sum(part for column in columns if (part := values & column).bit_count() == 1)
        column = next(column for column in columns if (values & column).bit_count() > 1)
        gains = missing.gains(decided, column, values & column)
        for bit in sorted(gains, key=lambda bit: (-gains[bit], random.random())):
            yield values & ~column | bit

    begin = seed | sum(column for column in space.columns if not column & seed)
    return next(space.solutions(begin, branches))


def _necessary(rows: list[int], masks: Sequence[int], cost: Callable[[int], float]) -> list[int]:
    """Returns the rows without those, dearest first, whose tuples the remaining rows have."""
    times = Counter(row & mask for row in rows for mask in masks)
    kept = list(rows)
    for row in sorted(rows, key=cost, reverse=True):
        if all(times[row & mask] > 1 for mask in masks):
            times.subtract(row & mask for mask in masks)
            kept.remove(row)
    return kept
