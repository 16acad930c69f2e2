"""The launcher with ranks that die, stop, sleep or fail: one report names the rank that is the cause."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tk.core.errors import TkError, WorkerDied
from tk.tests.train.launch.light_rank import stuck_file
from tk.train.health.heartbeat import HEARTBEATS_VARIABLE, Beat, read_beats
from tk.train.health.stall_detector import StallDetector
from tk.train.launch import launcher as launcher_module
from tk.train.launch.launcher import Launcher

LIMIT = 3600.0  # seconds, which no test waits: clocks stand still until what they wait for has happened


def _launcher(tmp_path: Path, fault: str = "none", num_ranks: int = 3) -> Launcher:
    faulty = str(min(1, num_ranks - 1))
    return Launcher("tk.tests.train.launch.light_rank", [faulty, fault], num_ranks, tmp_path / "logs", 5.0, LIMIT)


def _clock(has_happened: Callable[[], bool]) -> Callable[[], float]:
    """Returns a clock that goes on by two limits with each look, once something has happened."""
    now, happened = itertools.count(step=2 * LIMIT), False

    def look() -> float:
        nonlocal happened
        happened = happened or has_happened()
        return next(now) if happened else 0.0

    return look


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Launcher]:
    """Makes a launcher of three ranks that waits for rank 1, once it waits, until the others have ended."""

    def make(fault: str = "none") -> Launcher:
        launcher = _launcher(tmp_path, fault)

        def others_have_ended() -> bool:
            ended = [rank.poll() is not None for rank in launcher.ranks]
            return len(ended) == launcher.num_ranks and ended[0] and ended[2]

        clock = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=_clock(others_have_ended))
        monkeypatch.setattr(launcher_module, "time", clock)
        return launcher

    return make


def _when_running(launcher: Launcher, act: Callable[[], object]) -> threading.Thread:
    """Calls `act` from a thread once all ranks have made steps, and tells the ranks that rank 1 is stuck."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while not (len(launcher.ranks) == launcher.num_ranks and all(beat.step > 2 for beat in _beats(launcher))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        act()
        stuck_file(_heartbeats(launcher), 1).touch()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _heartbeats(launcher: Launcher) -> Path:
    """The folder of heartbeats; one that is not there if no rank has begun its program."""
    variables = Path(f"/proc/{launcher.ranks[-1].pid}/environ").read_text().split("\0")
    folders = [variable.split("=", 1)[1] for variable in variables if variable.startswith(HEARTBEATS_VARIABLE)]
    return Path(folders[0]) if folders else Path("/nowhere")


def _beats(launcher: Launcher) -> list[Beat]:
    return read_beats(_heartbeats(launcher), launcher.num_ranks)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, r"Rank 1 of 3 was killed by SIGKILL: rank 1 is at step \d+ in \w+; "),
        (
            signal.SIGSTOP,
            r"Other ranks lost rank 1 of 3, with no progress for \d+ seconds and no report .* in 5 seconds after that: "
            r"rank 1 is at step \d+ in \w+; ranks 0, 2 wait at step \d+ in",
        ),
    ],
)
def test_a_dead_or_stopped_rank_is_named_with_its_place(
    three: Callable[[], Launcher], number: signal.Signals, says: str
) -> None:
    launcher = three()
    thread = _when_running(launcher, lambda: os.kill(launcher.ranks[1].pid, number))
    with pytest.raises(WorkerDied, match=says):
        launcher.run()
    thread.join()
    assert all(rank.returncode is not None for rank in launcher.ranks)


def test_a_rank_that_sleeps_in_a_phase_is_named(three: Callable[[str], Launcher]) -> None:
    with pytest.raises(
        WorkerDied, match="rank 1 is at step 3 in forward; ranks 0, 2 wait at step 3 in reduce"
    ) as error:
        three("sleep").run()
    assert "the same command resumes" in str(error.value)


def test_a_lone_rank_that_sleeps_is_noticed_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = _launcher(tmp_path, "sleep", num_ranks=1)
    clock = _clock(lambda: bool(launcher.ranks) and _beats(launcher)[0].place == "at step 3 in forward")
    monkeypatch.setattr(launcher_module, "StallDetector", partial(StallDetector, clock=clock))
    with pytest.raises(WorkerDied, match="rank 0 is at step 3 in forward"):
        launcher.run()


def test_an_unexpected_error_of_a_rank_comes_before_its_consequences_on_other_ranks(
    three: Callable[[str], Launcher],
) -> None:
    with pytest.raises(TkError, match="Rank 1: ValueError: a fault of its own"):
        three("fail").run()
