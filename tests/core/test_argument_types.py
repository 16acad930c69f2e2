"""The types of values that callers give: those of numpy are as good, a bool is no number, a str is no list of str."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tk.core.argument_types import FLAG, INTEGER, INTEGERS, NUMBER, NUMBERS_BY_INTEGER, TEXT, TEXTS, ArgumentType
from tk.core.argument_types import wrong_type as first_wrong


@dataclass
class Given:
    one: Any = 1
    two: Any = 2


@pytest.mark.parametrize(
    ("type_", "accepted", "refused"),
    [
        (INTEGER, [0, -1, np.int32(3)], [True, 1.0, "1", None]),
        (NUMBER, [0, 0.5, np.float32(1)], [True, "1", None, 1j]),
        (FLAG, [True, False, np.bool_(True)], [0, 1, "yes", None]),
        (TEXT, ["", "a"], [b"a", 1, None]),
        (TEXTS, [(), ["a"], ("a", "b")], ["ab", b"ab", [1], {"a": 1}, 3, None]),
        (INTEGERS, [(), [1], range(3), {4}, np.arange(2)], ["12", [1.0], [True], {1: 2}, 1, None]),
        (NUMBERS_BY_INTEGER, [{}, {1: 2}, {np.int64(1): np.float64(2)}], [{"1": 2}, {1: "2"}, [(1, 2)], None]),
        (INTEGER | None, [None, 1], ["1"]),
    ],
)
def test_each_type_takes_its_values_and_no_others(type_: ArgumentType, accepted: list[Any], refused: list[Any]) -> None:
    assert [value for value in accepted if not type_.accepts(value)] == []
    assert [value for value in refused if type_.accepts(value)] == []


def test_the_first_wrong_value_is_named_with_its_type_and_a_short_text() -> None:
    types = {"one": INTEGER, "two": TEXT | None}
    assert first_wrong(Given(two=None), types) is None
    assert first_wrong(Given(one="x", two=3), types) == ("one", "str 'x'; it must be an integer.")
    name, why = first_wrong(Given(two=[1] * 100), types) or ("", "")
    assert name == "two"
    assert why.startswith("list [1, 1, ")
    assert why.endswith("...; it must be a str, or None.")
