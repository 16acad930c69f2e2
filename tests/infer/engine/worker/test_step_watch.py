"""The watch over steps, by a clock and by processes that the test invents."""

import logging
from collections.abc import Mapping
from contextlib import suppress

import pytest

from tk.core.errors import WorkerDied, WorkerStalled
from tk.infer.engine.worker.process_state import ProcessState
from tk.infer.engine.worker.step_watch import (
    LOOK_SECONDS,
    SECONDS_DEAD,
    SECONDS_LATE,
    TIMES_DEAD,
    TIMES_LATE,
    StepWatch,
)


class Watched:
    """A watch over two ranks, and what it reported.

    Args:
        timeout: of the watch.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.now = 1000.0
        self.states: Mapping[int, ProcessState] = {7: ProcessState("S"), 8: ProcessState("S")}
        self.reported: list[WorkerStalled | None] = []
        self.watch = StepWatch(timeout, self.reported.append, lambda: self.now, lambda number: self.states[number])

    def compute(self, seconds: float, computing: tuple[int, ...] = (), letters: str = "SS") -> None:
        """Lets time pass in looks, in which some ranks compute and all are in states."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_SECONDS
            self.states = {
                rank: ProcessState(letter, before.cpu_seconds + LOOK_SECONDS * (rank in computing))
                for (rank, before), letter in zip(self.states.items(), letters, strict=True)
            }
            self.watch.look((7, 8))


@pytest.mark.parametrize(
    ("computing", "letters", "hangs"),
    [
        ((), "SS", True),  # all wait, for what never comes
        ((7, 8), "SS", False),  # slow
        ((), "RR", False),  # they wait for a core
        ((8,), "SS", False),  # rank 0 waits for rank 1
        ((8,), "TS", True),  # rank 1 waits in a loop for rank 0, which is stopped
        ((7,), "SD", True),
        ((7,), "RZ", True),
        ((7, 8), "DD", False),  # they read from a disk, and compute
    ],
)
def test_workers_that_are_late_hang_only_if_they_do_not_compute(
    computing: tuple[int, ...], letters: str, hangs: bool
) -> None:
    watched = Watched()
    watched.watch.begin(lambda: 2.0)
    watched.compute(TIMES_LATE * 2.0 + SECONDS_LATE - LOOK_SECONDS, computing, letters)
    assert watched.reported == [], "in its time"
    watched.compute(3 * LOOK_SECONDS, computing, letters)
    assert [type(error) for error in watched.reported] == [WorkerStalled] * hangs
    watched.compute(20 * LOOK_SECONDS, computing, letters)
    assert len(watched.reported) == hangs, "once"


def test_an_answer_ends_the_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watched = Watched()
    for _ in range(2):
        watched.watch.begin(lambda: 0.0)
        watched.compute(3.0)
        watched.watch.answered()
        watched.watch.answered()
    assert [error is None for error in watched.reported] == [False, True] * 2
    assert [record.args is not None for record in caplog.records] == [True] * 4


@pytest.mark.parametrize(
    ("timeout", "expected", "limit"),
    [(None, 0.0, SECONDS_DEAD), (None, 10.0, 10.0 * TIMES_DEAD), (0.5, 10.0, 0.5), (900.0, 0.0, 900.0)],
)
def test_a_step_beyond_its_time_is_a_death_even_if_its_workers_compute(
    timeout: float | None, expected: float, limit: float
) -> None:
    watched = Watched(timeout)
    watched.watch.begin(lambda: expected)
    if limit > LOOK_SECONDS:
        watched.compute(limit - 2 * LOOK_SECONDS, (7, 8))
    with pytest.raises(WorkerDied, match=r"killed: rank 0 \(process 7, .*rank 1 \(process 8, ") as error:
        watched.compute(3 * LOOK_SECONDS, (7, 8))
    assert not isinstance(error.value, WorkerStalled)
    assert watched.reported == []


def test_workers_that_have_nothing_to_do_are_not_late() -> None:
    watched = Watched(1.0)
    watched.compute(500.0)
    watched.watch.begin(lambda: 0.0)
    watched.watch.answered()
    watched.watch.rest()
    watched.compute(500.0)
    assert watched.reported == []


@pytest.mark.parametrize(
    ("letters", "hangs"), [("SS", False), ("SR", False), ("DS", False), ("??", False), ("ST", True)]
)
def test_workers_without_a_step_hang_if_one_is_stopped(letters: str, hangs: bool) -> None:
    watched = Watched()

    def look(letters: str) -> None:
        watched.states = {7 + rank: ProcessState(letter) for rank, letter in enumerate(letters)}
        watched.watch.look_at_idle((7, 8))

    look(letters)
    assert watched.reported == [], "a debugger stops a process for a moment"
    for _ in range(3):
        look(letters)
    assert [type(error) for error in watched.reported] == [WorkerStalled] * hangs
    for _ in range(2):
        look("SS")
    assert watched.reported[1:] == [None] * hangs


def test_workers_that_were_stopped_before_a_step_answer_it_again() -> None:
    watched = Watched()
    watched.states = {7: ProcessState("T"), 8: ProcessState("S")}
    for _ in range(2):
        watched.watch.look_at_idle((7, 8))
    watched.watch.begin(lambda: 0.0)
    watched.compute(3.0, letters="TS")
    assert [error is None for error in watched.reported] == [False], "once"
    watched.watch.answered()
    assert [error is None for error in watched.reported] == [False, True]


def test_a_look_soon_after_another_compares_nothing() -> None:
    """A wake-up ends a wait early; in a moment no process need compute."""
    watched = Watched()
    watched.watch.begin(lambda: 0.0)
    watched.compute(SECONDS_LATE)
    for _ in range(100):
        watched.now += LOOK_SECONDS / 1000
        watched.watch.look((7, 8))
    assert watched.reported == []


@pytest.mark.parametrize(("timeout", "first"), [(None, 0.75), (0.5, 0.25), (0.1, 0.25), (60.0, 0.75)])
def test_nothing_looks_at_a_step_long_before_it_can_be_late(timeout: float | None, first: float) -> None:
    watched = Watched(timeout)
    for _ in range(2):
        watched.watch.begin(lambda: 100.0)
        assert watched.watch.seconds_to_look == first
        with suppress(WorkerDied):
            watched.compute(first)
        assert watched.watch.seconds_to_look == LOOK_SECONDS


@pytest.mark.parametrize(("timeout", "seconds"), [(None, SECONDS_LATE), (0.5, 0.5), (5.0, SECONDS_LATE)])
def test_nothing_is_predicted_of_a_step_that_cannot_be_late_yet(timeout: float | None, seconds: float) -> None:
    predicted: list[float] = []

    def predict() -> float:
        predicted.append(watched.now)
        return 100.0

    watched = Watched(timeout)
    watched.watch.begin(predict)
    watched.compute(seconds - LOOK_SECONDS)
    assert predicted == []
    with suppress(WorkerDied):
        watched.compute(3 * LOOK_SECONDS)
    assert len(predicted) == 1, "once"


def test_a_time_in_which_nothing_looked_is_not_the_workers() -> None:
    """Ctrl-Z and `fg` stop and continue a server with its workers; the server may look before they have answered."""
    watched = Watched(5.0)
    watched.watch.begin(lambda: 0.0)
    watched.compute(SECONDS_LATE, (7, 8))
    watched.now += 1000.0
    watched.states = {7: ProcessState("T"), 8: ProcessState("T")}
    watched.watch.look((7, 8))
    assert watched.reported == []
    watched.compute(2 * LOOK_SECONDS, letters="TT")
    assert [type(error) for error in watched.reported] == [WorkerStalled], "they are not continued"
    with pytest.raises(WorkerDied):
        watched.compute(5.0, letters="TT")
