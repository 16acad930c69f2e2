"""The launcher with ranks that die, stop, sleep or fail: one report names the rank that is the cause."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.core.errors import TkError, WorkerDied
from tk.train.health.heartbeat import HEARTBEATS_VARIABLE, read_beats
from tk.train.launch.launcher import Launcher

LIMIT = 1.0  # seconds; the light ranks wait 1.2 s for each other


def _launcher(tmp_path: Path, fault: str = "none", num_ranks: int = 3) -> Launcher:
    return Launcher("tk.tests.train.launch.light_rank", ["1", fault], num_ranks, tmp_path / "logs", 5.0, LIMIT)


def _when_running(launcher: Launcher, act: Callable[[], None]) -> threading.Thread:
    """Calls `act` from a thread once all ranks have made steps."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not (len(launcher.ranks) == launcher.num_ranks and _all_have_made_steps(launcher)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _all_have_made_steps(launcher: Launcher) -> bool:
    variables = Path(f"/proc/{launcher.ranks[1].pid}/environ").read_text().split("\0")
    folders = [variable.split("=", 1)[1] for variable in variables if variable.startswith(HEARTBEATS_VARIABLE)]
    return bool(folders) and all(beat.step > 2 for beat in read_beats(Path(folders[0]), launcher.num_ranks))


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, r"Rank 1 of 3 was killed by SIGKILL: rank 1 is at step \d+ in \w+; "),
        (signal.SIGSTOP, r"No progress for 1 seconds.*: rank 1 is at step \d+ in \w+; ranks 0, 2 wait at step \d+ in"),
    ],
)
def test_a_dead_or_stopped_rank_is_named_with_its_place(tmp_path: Path, number: signal.Signals, says: str) -> None:
    launcher = _launcher(tmp_path)
    thread = _when_running(launcher, lambda: os.kill(launcher.ranks[1].pid, number))
    with pytest.raises(WorkerDied, match=says):
        launcher.run()
    thread.join()
    assert all(rank.returncode is not None for rank in launcher.ranks)


def test_a_rank_that_sleeps_in_a_phase_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerDied, match="rank 1 is at step 3 in forward; ranks 0, 2 wait at step 3 in reduce"
    ) as error:
        _launcher(tmp_path, "sleep").run()
    assert "the same command resumes" in str(error.value)


def test_a_lone_rank_that_sleeps_is_noticed_by_the_launcher(tmp_path: Path) -> None:
    launcher = Launcher("tk.tests.train.launch.light_rank", ["0", "sleep"], 1, tmp_path / "logs", 5.0, LIMIT)
    with pytest.raises(WorkerDied, match="rank 0 is at step 3 in forward"):
        launcher.run()


def test_an_unexpected_error_of_a_rank_comes_before_its_consequences_on_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(TkError, match="Rank 1: ValueError: a fault of its own"):
        _launcher(tmp_path, "fail").run()
