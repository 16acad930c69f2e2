"""The attempts of a call: the pauses between them, and their end."""

import pytest

from tk.core.errors import Cancelled, InvalidRequest, Overloaded, TkError
from tk.infer.client.connection import Attempts, Unavailable

GONE = Unavailable("gone", "UNAVAILABLE")


def test_pauses_grow_and_are_drawn_so_that_callers_come_back_apart() -> None:
    first = [Attempts(9, None).pause_after(GONE) for _ in range(50)]
    assert all(0.1 <= pause <= 0.2 for pause in first)
    assert len(set(first)) > 40
    attempts = Attempts(99, None)
    pauses = [attempts.pause_after(GONE) for _ in range(12)]
    assert all(0.5 * 0.2 * 2**i <= pause <= 0.2 * 2**i for i, pause in enumerate(pauses[:5]))
    assert all(2.5 <= pause <= 5 for pause in pauses[6:])


def test_the_server_decides_the_least_pause() -> None:
    for asked in (0.001, 3.0, 40.0):
        pause = Attempts(9, None).pause_after(Overloaded("full", asked))
        assert max(asked, 0.1) <= pause <= max(asked + 0.1, 0.2)


@pytest.mark.parametrize("error", [InvalidRequest("wrong"), Cancelled("enough"), TkError("a fault")])
def test_an_error_that_another_attempt_would_meet_again_is_raised(error: TkError) -> None:
    with pytest.raises(type(error)):
        Attempts(9, None).pause_after(error)


def test_attempts_are_counted() -> None:
    attempts = Attempts(3, None)
    attempts.pause_after(GONE)
    attempts.pause_after(GONE)
    with pytest.raises(Unavailable):
        attempts.pause_after(GONE)


def test_one_deadline_holds_for_all_attempts_and_pauses() -> None:
    assert Attempts(3, None).seconds_left is None
    attempts = Attempts(9, 100.0)
    assert attempts.seconds_left == pytest.approx(100.0, abs=20)
    attempts.pause_after(GONE)
    with pytest.raises(Overloaded):
        attempts.pause_after(Overloaded("full", 500.0))
    short = Attempts(9, 0.0)
    assert short.seconds_left == 0
    with pytest.raises(Unavailable):
        short.pause_after(GONE)
