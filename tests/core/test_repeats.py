"""Things that repeat, on a clock of the test."""

from tk.core.repeats import MOST_KINDS, WINDOW, Repeats
from tk.tests.clock import Clock


def test_one_of_a_kind_is_shown_in_a_minute_and_the_others_are_counted() -> None:
    clock = Clock()
    repeats = Repeats[str](clock)
    assert [repeats.see("a", f"a{number}") for number in range(4)] == [0, None, None, None]
    assert repeats.see("b", "b0") == 0
    assert repeats.due() == []
    clock.now += WINDOW
    assert repeats.see("a", "a4") == 3
    assert repeats.see("a", "a5") is None
    clock.now += WINDOW / 2
    assert repeats.due() == []
    clock.now += WINDOW / 2
    assert repeats.due() == [("a5", 0)]
    assert repeats.due() == []
    assert repeats.see("a", "a6") is None, "its minute has begun again"
    assert repeats.due(at_end=True) == [("a6", 0)]
    assert not repeats.is_holding


def test_kinds_are_of_a_bounded_number() -> None:
    clock = Clock()
    repeats = Repeats[int](clock)
    shown = [repeats.see(number, number) for number in range(3 * MOST_KINDS)]
    assert shown.count(0) == MOST_KINDS + 1
    [(newest, others)] = repeats.due(at_end=True)
    assert (newest, others) == (3 * MOST_KINDS - 1, 2 * MOST_KINDS - 2)
    clock.now += 2 * WINDOW
    assert repeats.see("new", 0) == 0, "the oldest make room"
    assert repeats.see("newer", 0) == 0
