"""The matrix of layouts: the combinations of the axes' values that their rules leave, and a covering set of them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..core.errors import TkError
from .axes import AXES, FOREIGN_AXES
from .covering import covering_rows
from .layout import ParityLayout
from .space import Row, Rule, Space
from .subject import Subject


class LayoutSpace(Space):
    """The layouts of decoders, or those of foreign modules.

    Args:
        subject: the model, data and optimizer, which each layout must fit.
        num_ranks: the largest number of processes.
        axes: the values of each axis.
        foreign: whether the layouts are those of foreign modules.
    """

    def __init__(
        self, subject: Subject, num_ranks: int, axes: Mapping[str, Sequence[object]], foreign: bool = False
    ) -> None:
        self.foreign = foreign

        def fit(names: tuple[str, ...]) -> Rule:
            return Rule(names, lambda *values: rejection(self._layout(names, values), subject, num_ranks))

        groups = ((*group, name) for name in axes for group in AXES[name].checked_with)
        together = dict.fromkeys(tuple(name for name in group if name in axes) for group in groups)
        stated = [rule for name in axes for rule in AXES[name].rules if set(rule.axes) <= set(axes)]
        super().__init__(axes, stated + [fit(names) for names in together])

    def layout(self, row: Row) -> ParityLayout:
        """Returns the layout of a row."""
        return self._layout(self.axes, row)

    def _layout(self, axes: Iterable[str], values: Row) -> ParityLayout:
        chosen = dict(zip(axes, values, strict=True)) | {"foreign": self.foreign}
        if chosen.get("schedule") == "interleaved":
            chosen["num_virtual_stages"] = 2
        return ParityLayout.model_validate(chosen)

    def covering(self) -> Iterator[ParityLayout]:
        """Yields few layouts with every possible combination of values of two axes, and of three of strength 3.

        One of the axes is the model's kind: in a foreign module's space, every combination of two more.
        """
        groups: list[tuple[str, ...]] = [*combinations(self.axes, 2)]
        if not self.foreign:
            groups += combinations([axis for axis in self.axes if AXES[axis].strength == 3], 3)
        for row in covering_rows(self, groups, lambda row: self.layout(row).num_ranks):
            yield self.layout(row)


@dataclass(frozen=True)
class Matrix:
    """All combinations of the axes' values, of which none is listed.

    Attributes:
        spaces: the layouts of decoders and of foreign modules.
    """

    spaces: tuple[LayoutSpace, ...]

    @property
    def num_combinations(self) -> int:
        """The number of combinations, including those left out."""
        return sum(space.num_combinations for space in self.spaces)

    @property
    def num_layouts(self) -> int:
        """The number of combinations that can run, without those that repeat the program of another."""
        return sum(space.num_rows for space in self.spaces)

    def left_out(self) -> Counter[str]:
        """Returns the number of combinations left out, by reason."""
        return sum((space.left_out() for space in self.spaces), Counter())

    def layouts(self) -> Iterator[ParityLayout]:
        """Yields all layouts, without making a list."""
        for space in self.spaces:
            yield from map(space.layout, space.rows())

    def covering(self) -> tuple[ParityLayout, ...]:
        """Returns a small subset of the layouts with every possible combination of values of three axes."""
        return tuple(layout for space in self.spaces for layout in space.covering())


def matrix(subject: Subject, num_ranks: int) -> Matrix:
    """Returns the matrix of the combinations that fit the subject and `num_ranks` processes.

    The axes that vary the model are left out for a user's own model, and so are foreign modules.
    """
    axes = {name: (None,) if axis.of_model and not subject.varies_model else axis.values for name, axis in AXES.items()}
    if not subject.varies_model:
        return Matrix((LayoutSpace(subject, num_ranks, axes),))
    ruling = {name for each in FOREIGN_AXES for rule in AXES[each].rules for name in rule.axes}
    foreign = {
        name: axis.values if axis.foreign else axis.values[:1]
        for name, axis in AXES.items()
        if axis.foreign or name in ruling
    }
    return Matrix((LayoutSpace(subject, num_ranks, axes), LayoutSpace(subject, num_ranks, foreign, foreign=True)))


def rejection(layout: ParityLayout, subject: Subject, num_ranks: int) -> str:
    """Returns the message of the check that rejects a layout; "" if the layout can run."""
    if layout.num_ranks > num_ranks:
        return f"tp x pp x dp x cp is more than {num_ranks} ranks"
    try:
        subject.check(layout)
    except TkError as error:
        return str(error)
    return ""
