"""The matrix of layouts: the axes, the rules that leave out combinations, and a covering set of what is left."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Final

from ..core.errors import TkError
from .covering import covering_rows
from .layout import FOREIGN_AXES, OFFLOAD_AXES, ParityLayout
from .space import Row, Rule, Space
from .subject import Subject

COVERED_AXES: Final = 3  # the default set has every combination of values of so many axes, of two with OFFLOAD_AXES
AXES: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "tp": (1, 2, 4),
        "pp": (1, 2, 4),
        "dp": (1, 2, 4),
        "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1"),
        "zero": (0, 1, 2, 3),
        "shard_size": (0, 1, 2),
        "sequence_parallel": (False, True),
        "recompute": ("none", "selective", "full"),
        "tied": (False, True),
        "kv_heads": ("heads", "fewer", "fewer than tp"),
        "offload_optimizer": ("none", "cpu", "disk"),
        "offload_gradients": ("none", "cpu", "disk"),
        "offload_parameters": ("none", "cpu", "disk"),
        "offload_activations": ("none", "cpu"),
        "foreign": (False, True),
    }
)
# The axes that one of the subject's checks compares with each other. Each such group is checked with all other axes at
# their defaults.
CHECKED_TOGETHER: Final = (
    ("tp", "pp", "dp"),
    ("tp", "pp", "schedule", "tied", "kv_heads"),
    ("pp", "dp", "schedule"),
    ("dp", "zero", "shard_size"),
    ("tp", "sequence_parallel"),
)


def _after_states(optimizer: str, other: str) -> str:
    is_first = optimizer == "none" and other != "none"
    return "gradients and parameters leave the device only with the optimizer's states" if is_first else ""


STATED: Final = (  # rules in plain words, for repetitions and for what many layouts would refuse in words of their own
    Rule(
        ("tp", "sequence_parallel"),
        lambda tp, sequence_parallel: (
            "at tp = 1 sequence_parallel splits nothing: it equals the layout without it"
            if sequence_parallel and tp == 1
            else ""
        ),
    ),
    Rule(
        ("dp", "zero"),
        lambda dp, zero: "at dp = 1 ZeRO stage 1 shards nothing: it equals stage 0" if zero == 1 and dp == 1 else "",
    ),
    Rule(
        ("zero", "shard_size"),
        lambda zero, shard_size: (
            "ZeRO stage 0 shards nothing: shard_size has no effect" if shard_size and zero == 0 else ""
        ),
    ),
    Rule(
        ("dp", "shard_size"),
        lambda dp, shard_size: (
            "shard_size = dp shards over all of dp: it equals shard_size = 0" if shard_size == dp else ""
        ),
    ),
    Rule(("offload_optimizer", "offload_gradients"), _after_states),
    Rule(("offload_optimizer", "offload_parameters"), _after_states),
    Rule(
        ("zero", "offload_parameters"),
        lambda zero, parameters: (
            "below ZeRO stage 3 parameters are not offloaded" if zero < 3 and parameters != "none" else ""
        ),
    ),
)


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

        together = dict.fromkeys(tuple(name for name in names if name in axes) for names in CHECKED_TOGETHER)
        rules = [rule for rule in STATED if set(rule.axes) <= set(axes)]
        super().__init__(axes, rules + [fit(names) for names in together if names])

    def layout(self, row: Row) -> ParityLayout:
        """Returns the layout of a row."""
        return self._layout(self.axes, row)

    def _layout(self, axes: Iterable[str], values: Row) -> ParityLayout:
        chosen = dict(zip(axes, values, strict=True)) | {"foreign": self.foreign}
        if chosen.get("schedule") == "interleaved":
            chosen["num_virtual_stages"] = 2
        return ParityLayout.model_validate(chosen)

    def covering(self) -> Iterator[ParityLayout]:
        """Yields few layouts with every possible combination of values of three axes, or of two with an OFFLOAD_AXES.

        One of the axes is the model's kind: in a foreign module's space, every combination of two more.
        """
        groups: list[tuple[str, ...]] = [*combinations(self.axes, 2)]
        if not self.foreign:
            groups += combinations([axis for axis in self.axes if axis not in OFFLOAD_AXES], COVERED_AXES)
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
    axes = {axis: values for axis, values in AXES.items() if axis != "foreign"}
    if not subject.varies_model:
        return Matrix((LayoutSpace(subject, num_ranks, axes | {"tied": (None,), "kv_heads": (None,)}),))
    foreign = {axis: AXES[axis] for axis in FOREIGN_AXES}
    return Matrix((LayoutSpace(subject, num_ranks, axes), LayoutSpace(subject, num_ranks, foreign, foreign=True)))


def rejection(layout: ParityLayout, subject: Subject, num_ranks: int) -> str:
    """Returns the message of the check that rejects a layout; "" if the layout can run."""
    if layout.num_ranks > num_ranks:
        return f"tp x pp x dp is more than {num_ranks} ranks"
    try:
        subject.check(layout)
    except TkError as error:
        return str(error)
    return ""
