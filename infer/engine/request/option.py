"""Options whose table is a dataclass: each field says where it is on the wire, and which values it takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final, TypeVar

from ....core.argument_types import ArgumentType

INT32: Final = "<i4"
FLOAT32: Final = "<f4"
_KEY: Final = "option"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an option takes.

    Attributes:
        low: the lowest one.
        high: the highest one; inf = there is none.
        words: what they are, after "it must be".
        has_low: whether `low` itself is one.
    """

    low: float
    high: float
    words: str
    has_low: bool = True

    def has(self, value: float) -> bool:
        """Returns whether a number is one of them; NaN and infinity never are."""
        return math.isfinite(value) and self.low <= value <= self.high and (self.has_low or value != self.low)


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its default.

    Attributes:
        part: the part of the wire's request that has it: "sampling", "stopping" or "output".
        kind: the type of its values.
        allowed: its numbers; None = all, or other checks.
        column: the type of its column in a step, from which the samplers read it; None = it has none.
    """

    part: str
    kind: ArgumentType
    allowed: Range | None = None
    column: str | None = None


def option(default: T, part: str, kind: ArgumentType, allowed: Range | None = None, column: str | None = None) -> T:
    """Returns the field of an option; see `Option`."""
    made: T = field(default=default, metadata=option_metadata(part, kind, allowed, column))
    return made


def option_metadata(
    part: str, kind: ArgumentType, allowed: Range | None = None, column: str | None = None
) -> Mapping[str, Option]:
    """Returns what makes a field of a dataclass an option; see `Option`."""
    return {_KEY: Option(part, kind, allowed, column)}


def options_of(table: type) -> Mapping[str, Option]:
    """Returns the options of a dataclass by name, in its order."""
    return MappingProxyType({each.name: each.metadata[_KEY] for each in fields(table) if _KEY in each.metadata})
