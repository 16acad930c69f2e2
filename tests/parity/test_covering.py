"""Covering sets: against brute force on small spaces with any rules, and in spaces too large for it."""

from collections.abc import Sequence
from itertools import combinations, pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from tk.parity.covering import covering_rows
from tk.parity.space import Rule, Space
from tk.tests.example_counts import examples
from tk.tests.parity.test_space import brute_force, spaces


def tuples(rows: Sequence[Sequence[object]], strength: int) -> set[tuple[tuple[int, object], ...]]:
    """Returns every choice of `strength` (column, value) pairs of any row."""
    return {pairs for row in rows for pairs in combinations(enumerate(row), strength)}


@examples(60)
@given(spaces(), st.integers(1, 4))
def test_a_covering_set_covers_and_leaves_nothing_out(
    drawn: tuple[dict[str, list[int]], list[Rule]], strength: int
) -> None:
    axes, rules = drawn
    strength = min(strength, len(axes))
    chosen = covering_rows(Space(axes, rules), combinations(axes, strength))
    rows = brute_force(axes, rules)
    assert set(chosen) <= set(rows), "every row is valid"
    assert len(set(chosen)) == len(chosen)
    assert chosen == covering_rows(Space(axes, rules), combinations(axes, strength))
    for fewer in range(1, strength + 1):
        assert tuples(chosen, fewer) == tuples(rows, fewer)
    for left in range(len(chosen)):
        rest = chosen[:left] + chosen[left + 1 :]
        assert tuples(rest, strength) != tuples(rows, strength), "no row is superfluous"


def test_groups_of_axes_may_have_any_size() -> None:
    space = Space({name: range(4) for name in "abcde"})
    rows = covering_rows(space, [("a", "b", "c"), ("d",), ("d", "e")])
    assert len(rows) == 4**3
    assert {row[:3] for row in rows} == {tuple(each) for each in product(range(4), repeat=3)}
    assert {row[3:] for row in rows} == {tuple(each) for each in product(range(4), repeat=2)}


def test_a_covering_set_is_small_and_prefers_cheap_rows() -> None:
    ternary = Space({name: range(3) for name in "abcd"})
    assert 9 <= len(covering_rows(ternary, combinations("abcd", 2))) <= 12  # orthogonal arrays need 9
    binary = Space({name: range(2) for name in "abcdefghijk"})
    assert len(covering_rows(binary, combinations("abcdefghijk", 3))) <= 20  # the least known is 12
    dear = covering_rows(Space({"a": range(2), "b": range(4)}), [("a",), ("b",)], cost=lambda row: -int(str(row[0])))
    assert [row[0] for row in dear].count(0) == 1


def test_a_value_that_only_a_chain_of_rules_forbids_is_left_out() -> None:
    """No rule forbids a = 0; but it wants b = 0, that c = 0, that d = 0, and d = 0 forbids both values of e."""
    axes = {name: range(2) for name in "abcde"}
    chain = [Rule(pair, lambda first, second: "" if first or not second else "no") for pair in pairwise("abcd")]
    ends = [Rule(("d", "e"), lambda d, e, value=value: "no" if not d and e == value else "") for value in range(2)]
    rows = covering_rows(Space(axes, [*chain, *ends]), combinations(axes, 3))
    assert rows
    assert {row[:4] for row in rows} == {(1, 1, 1, 1)}


def test_millions_of_rows_cost_no_more_questions_than_their_rules_have_combinations() -> None:
    """The axes of `tk parity`, and five more of four values each."""
    asked: list[tuple[int, ...]] = []

    def small(*values: int) -> str:
        asked.append(values)
        return "too much" if sum(values) > 4 else ""

    sizes = {"tp": 3, "pp": 3, "dp": 3, "schedule": 4, "zero": 4, "shard": 3, "sp": 2, "recompute": 3, "tied": 2}
    sizes |= {"kv": 3} | dict.fromkeys(["one", "two", "three", "four", "five"], 4)
    axes = {name: range(size) for name, size in sizes.items()}
    rules = [Rule(("tp", "pp", "dp"), small), Rule(("one", "two", "three"), small), Rule(("zero", "one"), small)]
    space = Space(axes, rules)
    assert space.num_combinations == 46_656 * 4**5 > 25 * 10**6
    rows = covering_rows(space, combinations(axes, 2))
    assert len(rows) < 40
    assert space.num_rows > 10**7
    assert len(asked) == 27 + 64 + 16
