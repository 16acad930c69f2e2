"""The grammars that are kept: each principal's own, a bounded number, none that is worn."""

from typing import cast

import pytest

from tk.infer.engine.grammar.compiler import KeptGrammars
from tk.infer.engine.grammar.grammar import Grammar


class Stub:
    def __init__(self) -> None:
        self.is_worn = False


def stub() -> Grammar:
    return cast(Grammar, Stub())


def names(kept: KeptGrammars, principal: str, count: int) -> list[int]:
    return [name for name in range(count) if kept.find(principal, name) is not None]


def test_a_principal_that_has_many_takes_no_place_of_others() -> None:
    kept = KeptGrammars(8)
    for name in range(3):
        kept.add("quiet", name, stub())
    for name in range(100):
        kept.add("loud", name, stub())
    assert names(kept, "quiet", 3) == [0, 1, 2]
    assert names(kept, "loud", 100) == [95, 96, 97, 98, 99]
    for name in range(100):
        kept.add("third", name, stub())
    counts = [len(names(kept, principal, 100)) for principal in ("quiet", "loud", "third")]
    assert counts == [3, 3, 2]


def test_the_one_that_was_not_used_for_longest_goes() -> None:
    kept = KeptGrammars(2)
    for name in range(2):
        kept.add("a", name, stub())
    assert kept.find("a", 0) is not None
    kept.add("a", 2, stub())
    assert names(kept, "a", 3) == [0, 2]


def test_principals_share_none() -> None:
    kept = KeptGrammars(2)
    kept.add("a", 0, stub())
    assert kept.find("b", 0) is None


@pytest.mark.parametrize("principal", ["a", "b"])
def test_a_worn_grammar_is_let_go(principal: str) -> None:
    kept, worn = KeptGrammars(2), Stub()
    kept.add("a", 0, cast(Grammar, worn))
    worn.is_worn = True
    assert kept.find("a", 0) is None
    kept.add(principal, 1, stub())
    worn.is_worn = False
    assert kept.find("a", 0) is None, "nothing has it any more"
    assert kept.find(principal, 1) is not None
