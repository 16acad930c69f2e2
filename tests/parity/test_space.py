"""Spaces of combinations: rows, counts and reasons are those of brute force, without listing the product."""

from collections import Counter
from itertools import islice, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.parity.space import Rule, Space
from tk.tests.example_counts import examples


def reason_of(axes: dict[str, list[int]], rules: list[Rule], row: tuple[int, ...]) -> str:
    """Returns the reason of the first rule that leaves a combination out; "" if none does."""
    value = dict(zip(axes, row, strict=True))
    return next(filter(None, (rule.reason(*(value[axis] for axis in rule.axes)) for rule in rules)), "")


def brute_force(axes: dict[str, list[int]], rules: list[Rule]) -> list[tuple[int, ...]]:
    """Returns all valid rows."""
    return [row for row in product(*axes.values()) if not reason_of(axes, rules, row)]


@st.composite
def spaces(draw: st.DrawFn) -> tuple[dict[str, list[int]], list[Rule]]:
    """Draws up to five axes of up to four values, with up to five rules on one to three axes each."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    axes = {f"axis{number}": list(range(size)) for number, size in enumerate(sizes)}
    rules = []
    for _ in range(draw(st.integers(0, 5))):
        names = tuple(draw(st.lists(st.sampled_from(list(axes)), min_size=1, max_size=3, unique=True)))
        everything = list(product(*(axes[name] for name in names)))
        forbidden = draw(st.dictionaries(st.sampled_from(everything), st.sampled_from(["one", "other"]), max_size=12))
        rules.append(Rule(names, lambda *values, forbidden=forbidden: forbidden.get(values, "")))
    return axes, rules


@examples(100)
@given(spaces())
def test_rows_counts_and_reasons_are_those_of_brute_force(drawn: tuple[dict[str, list[int]], list[Rule]]) -> None:
    axes, rules = drawn
    space, expected = Space(axes, rules), brute_force(axes, rules)
    assert list(space.rows()) == expected
    assert space.num_rows == len(expected)
    reasons = Counter(reason for row in product(*axes.values()) if (reason := reason_of(axes, rules, row)))
    assert space.left_out() == reasons
    assert space.num_combinations == len(expected) + reasons.total()


def test_the_rules_are_asked_about_their_own_axes_only_however_many_there_are() -> None:
    asked: list[tuple[Any, ...]] = []

    def differ(*values: int) -> str:
        asked.append(values)
        return "equal" if len(set(values)) < len(values) else ""

    names = [f"axis{number}" for number in range(40)]
    space = Space({name: range(4) for name in names}, [Rule(pair, differ) for pair in pairwise(names)])
    assert space.num_combinations == 4**40
    assert space.num_rows == 4 * 3**39, "neighbours differ"
    assert len(list(islice(space.rows(), 1000))) == 1000
    assert space.left_out() == {"equal": 4**40 - 4 * 3**39}
    assert len(asked) == 39 * 16


@pytest.mark.parametrize("forbidden", [(0,), (0, 1)])
def test_an_axis_without_a_value_left_leaves_no_row(forbidden: tuple[int, ...]) -> None:
    space = Space({"a": range(2), "b": range(3)}, [Rule(("a",), lambda a: "no" if a in forbidden else "")])
    assert space.num_rows == len(list(space.rows())) == 3 * (2 - len(forbidden))
