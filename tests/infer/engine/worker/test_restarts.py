"""The policy of restarts, with scripted workers."""

from collections.abc import Iterator

import pytest

from tk.core.errors import Cancelled, ShardCorrupt, TkError, WorkerDied
from tk.infer.engine.worker.restarts import LEAST_SECONDS, Availability, turn_with_restarts

Step = bool | TkError


class Script:
    """Turns and starts that follow a script, and a record of the calls."""

    def __init__(self, turns: list[Step], starts: list[TkError | float] | None = None) -> None:
        self._turns: Iterator[Step] = iter(turns)
        self._starts: Iterator[TkError | float] = iter(starts or [])
        self.seen: list[str] = []
        self.refusals: list[WorkerDied] = []

    def turn(self) -> bool:
        step = next(self._turns)
        self.seen.append("turn")
        if isinstance(step, TkError):
            raise step
        return step

    def start_again(self) -> float:
        self.seen.append("start")
        seconds = next(self._starts)
        if isinstance(seconds, TkError):
            raise seconds
        return seconds

    def refuse(self, error: WorkerDied) -> None:
        self.seen.append("refuse")
        self.refusals.append(error)

    def run(self, most: int) -> None:
        turn_with_restarts(self.turn, self.start_again, self.refuse, most)


def test_without_deaths_turns_go_on_until_one_says_no() -> None:
    script = Script([True, True, False])
    script.run(3)
    assert script.seen == ["turn"] * 3


def test_requests_are_refused_with_a_time_to_retry_before_the_workers_start_again() -> None:
    script = Script([True, WorkerDied("Rank 1 died."), True, WorkerDied("Rank 0 died."), False], [7.5, 0.1])
    script.run(2)
    assert script.seen == ["turn", "turn", "refuse", "start", "turn", "turn", "refuse", "start", "turn"]
    assert [error.retry_after for error in script.refusals] == [LEAST_SECONDS, 7.5], "as long as the last start took"
    assert "Rank 0 died." in str(script.refusals[1])


def test_the_death_after_the_last_restart_is_final() -> None:
    script = Script([WorkerDied("once"), WorkerDied("twice")], [0.0])
    with pytest.raises(WorkerDied, match=r"^twice$") as error:
        script.run(1)
    assert error.value.retry_after is None
    assert len(script.refusals) == 1
    with pytest.raises(WorkerDied, match="once"):
        Script([WorkerDied("once")]).run(0)


def test_a_start_that_fails_counts_as_a_death() -> None:
    script = Script([WorkerDied("once"), False], [ShardCorrupt("a flipped bit"), 0.0])
    script.run(2)
    assert script.seen == ["turn", "refuse", "start", "refuse", "start", "turn"]
    with pytest.raises(WorkerDied, match="a flipped bit"):
        Script([WorkerDied("once")], [ShardCorrupt("a flipped bit")]).run(1)


def test_an_error_of_the_engines_own_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    own = TkError("the plan is wrong")
    script = Script([own, WorkerDied("once"), False], [ShardCorrupt("a flipped bit"), 0.0, 0.0])
    script.run(3)
    assert "the plan is wrong" in str(script.refusals[0])
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None
    assert record.exc_info[1] is own, "that of a worker has its own in the log"
    caplog.clear()
    with pytest.raises(WorkerDied, match="the plan is wrong"):
        Script([own]).run(0)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [own]


def test_a_close_while_they_start_ends_everything() -> None:
    with pytest.raises(Cancelled):
        Script([WorkerDied("once")], [Cancelled("closed")]).run(5)


def test_watchers_hear_of_reports_and_late_ones_of_the_last_death() -> None:
    availability = Availability()
    early: list[WorkerDied | None] = []
    late: list[WorkerDied | None] = []
    availability.watch(early.append)
    death = WorkerDied("gone", 2.0)
    availability.report(death)
    availability.watch(late.append)
    availability.report(None)
    assert early == late == [death, None]
    again: list[WorkerDied | None] = []
    availability.watch(again.append)
    assert again == []
