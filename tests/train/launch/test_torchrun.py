"""Ranks under torchrun that lose others: the first one writes the report for all, and earlier reports stay."""

from pathlib import Path

from tk.train.health.heartbeat import Heartbeat
from tk.train.launch.torchrun import give_up, keep_earlier_report

LOST = RuntimeError("Connection closed by peer [10.0.0.7]:4711")


def test_one_rank_writes_the_report_and_names_the_ranks_that_did_not_give_up(tmp_path: Path) -> None:
    logs, beats = tmp_path, tmp_path / "heartbeats"
    ranks = [Heartbeat(beats, rank) for rank in range(4)]
    for rank in ranks:
        rank.beat("reduce", 41)
    ranks[3].beat("forward")
    ranks[1].give_up()
    ranks[2].give_up()
    first = str(give_up(ranks[0], beats, 4, logs, 9.0, LOST))
    assert "rank 3 is at step 41 in forward; ranks 0-2 wait at step 41 in reduce" in first
    assert "Connection closed by peer [10.0.0.7]:4711." in first
    assert (logs / "stall-report.txt").read_text() == first + "\n"
    others = str(give_up(ranks[1], beats, 4, logs, 9.0, LOST))
    assert others == f"Other ranks have died or are stuck; see {logs / 'stall-report.txt'}."


def test_the_report_is_written_within_the_timeout(tmp_path: Path) -> None:
    ranks = [Heartbeat(tmp_path, rank) for rank in range(3)]
    for rank in ranks:
        rank.beat("backward", 7)
    report = str(give_up(ranks[0], tmp_path, 3, tmp_path, 0.1, LOST))
    assert "ranks 1-2 are at step 7 in backward; rank 0 waits at step 7 in backward" in report


def test_the_report_of_an_earlier_attempt_is_renamed(tmp_path: Path) -> None:
    keep_earlier_report(tmp_path)
    (tmp_path / "stall-report.txt").write_text("earlier")
    keep_earlier_report(tmp_path)
    assert [path.read_text() for path in tmp_path.glob("stall-report-*.txt")] == ["earlier"]
    assert not (tmp_path / "stall-report.txt").exists()
