"""The types of values that Python callers give, checked where annotations promise them, with words for the error.

A wrong type would else raise TypeError far from its cause, or pass unseen: a str is a sequence of strings too.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import numpy as np


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """The values that an argument takes.

    Attributes:
        words: what they are, after "it must be".
        accepts: returns whether a value is one of them.
    """

    words: str
    accepts: Callable[[Any], bool]

    def __or__(self, none: None) -> "ArgumentType":
        """Returns the type that also takes None."""
        return ArgumentType(f"{self.words}, or None", lambda value: value is None or self.accepts(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _are(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def accept(values: Any) -> bool:
        is_whole = isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection)
        return not is_whole and all(map(accepts, values))

    return accept


INTEGER: Final = ArgumentType("an integer", _is_integer)
NUMBER: Final = ArgumentType("a number", _is_number)
FLAG: Final = ArgumentType("True or False", lambda value: isinstance(value, (bool, np.bool_)))
TEXT: Final = ArgumentType("a str", lambda value: isinstance(value, str))
TEXTS: Final = ArgumentType("a tuple or list of str", _are(TEXT.accepts))
PATH: Final = ArgumentType("a str or a pathlib.Path", lambda value: isinstance(value, (str, os.PathLike)))
PATHS_BY_TEXT: Final = ArgumentType(
    "a dict from str to paths",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(k, str) and isinstance(v, (str, os.PathLike)) for k, v in value.items())
    ),
)
INTEGERS: Final = ArgumentType("a tuple or list of integers", _are(_is_integer))
NUMBERS_BY_INTEGER: Final = ArgumentType(
    "a dict from integers to numbers",
    lambda value: isinstance(value, Mapping) and all(_is_integer(k) and _is_number(v) for k, v in value.items()),
)


def wrong_type(owner: object, types: Mapping[str, ArgumentType]) -> tuple[str, str] | None:
    """Returns the first attribute of `owner` whose value has another type, and why; None if there is none."""
    for name, type_ in types.items():
        value = getattr(owner, name)
        if not type_.accepts(value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            return name, f"{type(value).__name__} {shown}; it must be {type_.words}."
    return None
