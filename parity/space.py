"""A space of combinations: axes with their values, and rules that leave out combinations of a few axes' values.

Nothing here lists the product of the axes, which soon has millions of members. A rule is asked once about each
combination of the values of its own axes, and is a table from then on. The valid rows, which have one value of each
axis and break no rule, are found by backtracking: after each choice, every table takes away the values that none of its
allowed combinations has any more (generalised arc consistency: Mackworth, Consistency in networks of relations,
Artificial Intelligence 8, 1977). They are counted by eliminating one axis after the other (Dechter, Bucket elimination,
Artificial Intelligence 113, 1999).

A set of values is an int with a bit per value of an axis; a row has one bit per axis.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

Row = tuple[object, ...]
Branches = Callable[[int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule on the values of a few axes.

    Attributes:
        axes: the names of the axes.
        reason: maps a value of each of them to the reason for leaving the combination out; "" if it is allowed.
    """

    axes: tuple[str, ...]
    reason: Callable[..., str]


@dataclass(frozen=True, slots=True)
class Table:
    """A rule as sets of values.

    Attributes:
        columns: the positions of its axes.
        mask: all values of its axes.
        reasons: the reason for each combination; "" = allowed.
    """

    columns: tuple[int, ...]
    mask: int
    reasons: Mapping[int, str]
    _supports: dict[int, int] = field(default_factory=dict, repr=False)

    def having(self, reason: str) -> frozenset[int]:
        """Returns the combinations with a reason."""
        return frozenset(values for values, given in self.reasons.items() if given == reason)

    def support(self, values: int) -> int:
        """Returns those of the values, all of this table's axes, that an allowed combination of them has."""
        known = self._supports.get(values)
        if known is None:
            known = 0
            for combination, reason in self.reasons.items():
                if not reason and not combination & ~values:
                    known |= combination
            self._supports[values] = known
        return known


class Space:
    """All combinations of the axes' values, and the valid ones among them.

    Args:
        axes: the values of each axis, by name.
        rules: the rules; of several that leave out a combination, the first one gives the reason.

    Attributes:
        columns: the set of all values of each axis.
        all: the set of all values of all axes.
    """

    def __init__(self, axes: Mapping[str, Sequence[object]], rules: Sequence[Rule] = ()) -> None:
        self.axes = dict(axes)
        self.columns: list[int] = []
        start = 0
        for values in self.axes.values():
            self.columns.append(((1 << len(values)) - 1) << start)
            start += len(values)
        self.all = (1 << start) - 1
        self._values = [value for values in self.axes.values() for value in values]
        self._tables = [self._table(rule) for rule in rules]

    def _table(self, rule: Rule) -> Table:
        names = list(self.axes)
        columns = tuple(names.index(axis) for axis in rule.axes)
        reasons = {
            sum(combination): rule.reason(*(self.value(bit) for bit in combination))
            for combination in product(*(bits(self.columns[column]) for column in columns))
        }
        return Table(columns, sum(self.columns[column] for column in columns), reasons)

    def mask(self, axes: Iterable[str]) -> int:
        """Returns all values of some axes."""
        names = list(self.axes)
        return sum(self.columns[names.index(axis)] for axis in axes)

    def num_axes(self, mask: int) -> int:
        """Returns the number of axes of which a set has values."""
        return sum(bool(column & mask) for column in self.columns)

    def value(self, bit: int) -> object:
        """Returns the value of one bit."""
        return self._values[bit.bit_length() - 1]

    def row(self, values: int) -> Row:
        """Returns the values of a row, in the order of the axes."""
        return tuple(self.value(bit) for bit in bits(values))

    @property
    def num_combinations(self) -> int:
        """The number of combinations of all axes' values."""
        return prod(len(values) for values in self.axes.values())

    @cached_property
    def num_rows(self) -> int:
        """The number of valid rows, counted without listing them."""
        return self._count([(table.columns, table.having("")) for table in self._tables])

    def left_out(self) -> Counter[str]:
        """Counts the combinations that are left out, by reason, without listing them."""
        counter: Counter[str] = Counter()
        allowed: list[tuple[tuple[int, ...], frozenset[int]]] = []
        for table in self._tables:
            for reason in dict.fromkeys(filter(None, table.reasons.values())):
                counter[reason] += self._count([*allowed, (table.columns, table.having(reason))])
            allowed.append((table.columns, table.having("")))
        return +counter

    def _count(self, allowed: Sequence[tuple[tuple[int, ...], frozenset[int]]]) -> int:
        """Counts the combinations that all tables of allowed combinations allow.

        The values of an axis are forgotten after the last table that has it.
        """
        states: Mapping[int, int] = {0: 1}
        for position, column in enumerate(self.columns):
            ripe = [
                (sum(self.columns[c] for c in columns), combinations)
                for columns, combinations in allowed
                if max(columns) == position
            ]
            later = [c for columns, _ in allowed if max(columns) > position for c in columns]
            kept = sum(self.columns[c] for c in set(later))
            extended: Counter[int] = Counter()
            for state, count in states.items():
                for bit in bits(column):
                    values = state | bit
                    if all(values & mask in combinations for mask, combinations in ripe):
                        extended[values & kept] += count
            states = extended
        return sum(states.values())

    def rows(self) -> Iterator[Row]:
        """Yields all valid rows, the last axis changing fastest, without making a list."""
        for values in self.solutions(self.all, self.in_order):
            yield self.row(values)

    def solutions(self, values: int, branches: Branches) -> Iterator[int]:
        """Yields each valid row within a set of values that has some of each axis.

        Args:
            branches: divides a set of values with several of one axis into smaller sets; their order is that of the
                rows.
        """
        values = self.narrowed(values)
        if values.bit_count() == len(self.columns):
            yield values
        elif values:
            for part in branches(values):
                yield from self.solutions(part, branches)

    def in_order(self, values: int) -> Iterator[int]:
        """Divides a set of values by the first axis of which it has several."""
        column = next(column for column in self.columns if (values & column).bit_count() > 1)
        for bit in bits(values & column):
            yield values & ~column | bit

    def narrowed(self, values: int) -> int:
        """Returns the values that the rules leave, looking at one rule at a time; 0 if none of some axis is left."""
        before = 0
        while before != values:
            before = values
            for table in self._tables:
                support = table.support(values & table.mask)
                if not support:
                    return 0
                values &= support | ~table.mask
        return values


def bits(values: int) -> Iterator[int]:
    """Yields each single bit of a set, the lowest first."""
    while values:
        lowest = values & -values
        yield lowest
        values ^= lowest
