"""The launcher with ranks that die, stop, sleep or fail: one report names the rank that is the cause."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tk.core.errors import TkError, WorkerDied
from tk.train.launch.flight_recorder import is_peer_loss
from tk.train.launch.heartbeat import HEARTBEATS_VARIABLE, Beat, Heartbeat, read_beats
from tk.train.launch.launcher import Launcher
from tk.train.launch.stall_detector import StallDetector, describe_places, name_ranks
from tk.train.launch.stop import StopRequest

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


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beats", 2)
    heartbeat.beat("forward of micro-batch 3 on stage 1", 41)
    heartbeat.beat("x" * 200)
    heartbeat.give_up()
    beats = read_beats(tmp_path / "beats", 4)
    assert [beat.place for beat in beats] == ["still starting"] * 2 + [f"at step 41 in {'x' * 96}", "still starting"]
    assert [beat.gave_up for beat in beats] == [False, False, True, False]


def test_the_detector_uses_only_its_own_clock(tmp_path: Path) -> None:
    now = 0.0
    ranks = [Heartbeat(tmp_path, rank) for rank in range(3)]
    for rank in ranks[:2]:
        rank.beat("loading")
    detector = StallDetector(tmp_path, 3, 10.0, clock=lambda: now)
    now = 9.0
    ranks[1].beat("forward", 1)
    assert detector.look() == []
    now = 11.0
    assert detector.look() == [0]
    ranks[0].beat("forward", 1)
    assert detector.look() == []
    now = 22.0
    assert detector.look() == [0, 1]
    now = 61.0
    assert detector.look() == [0, 1, 2], "a minute to start, and no more"


def test_places_are_grouped_and_ranks_joined() -> None:
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    beats = [Beat(rank, 41, "reduce", 0.0) for rank in range(3)] + [Beat(3, 41, "forward", 0.0)]
    text = describe_places(beats, [3])
    assert text == "rank 3 is at step 41 in forward; ranks 0-2 wait at step 41 in reduce"


def test_errors_that_show_lost_ranks_are_distinguished_from_causes() -> None:
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    wrapped = WorkerDied("rank 2 is gone")
    wrapped.__cause__ = lost
    assert is_peer_loss(lost)
    assert is_peer_loss(wrapped)
    assert is_peer_loss(dist.DistBackendError("NCCL timeout"))
    assert not is_peer_loss(WorkerDied("the process that writes checkpoints was killed by signal 9"))
    assert not is_peer_loss(RuntimeError("shapes do not match"))


def test_two_signals_within_the_echo_time_are_one_request() -> None:
    stop = StopRequest(echo_seconds=60.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop.install()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)  # without the echo's time, the second would end this process
        assert stop.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
