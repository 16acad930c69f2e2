"""The stall detector: ranks whose heartbeats stay the same for too long, and their places in words."""

from pathlib import Path

from tk.train.health.heartbeat import Beat, Heartbeat
from tk.train.health.stall_detector import StallDetector, describe_places, name_ranks


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
    assert (detector.seconds_in_place([1]), detector.seconds_in_place([0, 2])) == (52.0, 50.0)


def test_places_are_grouped_and_ranks_joined() -> None:
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    beats = [Beat(rank, 41, "reduce", 0.0) for rank in range(3)] + [Beat(3, 41, "forward", 0.0)]
    text = describe_places(beats, [3])
    assert text == "rank 3 is at step 41 in forward; ranks 0-2 wait at step 41 in reduce"
