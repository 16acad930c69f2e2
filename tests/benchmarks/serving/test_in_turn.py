"""Runs in turn, medians, and promises."""

import pytest

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.serving.in_turn import Promise, best_of, compared, medians_in_turn, ratios
from tk.benchmarks.serving.peer_process import PeerFailed

WORKLOAD = SpeedWorkload(2, 8, 1)


class Listed:
    """A contestant with listed speeds, which fails when there are no more; `order` gets its name at each run."""

    def __init__(self, name: str, speeds: list[float], order: list[str]) -> None:
        self.name, self._speeds, self._order = name, list(speeds), order

    def run(self, workload: SpeedWorkload) -> Speeds:
        assert workload == WORKLOAD
        self._order.append(self.name)
        if not self._speeds:
            raise PeerFailed(f"{self.name} failed")
        return {"prefill": self._speeds.pop(0)}


def test_contestants_run_in_turn_and_medians_are_returned() -> None:
    order: list[str] = []
    contestants = [Listed("a", [1.0, 9.0, 2.0], order), Listed("b", [5.0, 4.0, 6.0], order)]
    assert medians_in_turn(contestants, WORKLOAD, 3) == {"a": {"prefill": 2.0}, "b": {"prefill": 5.0}}
    assert "".join(order) == "abbaab"


def test_each_round_begins_with_another_contestant() -> None:
    order: list[str] = []
    medians_in_turn([Listed(name, [1.0] * 4, order) for name in "abc"], WORKLOAD, 4)
    assert "".join(order) == "abcbcacababc"


def test_a_contestant_that_fails_is_left_out_and_shown() -> None:
    order: list[str] = []
    shown: list[str] = []
    contestants = [Listed("a", [1.0, 1.0, 1.0], order), Listed("b", [5.0], order)]
    assert medians_in_turn(contestants, WORKLOAD, 3, shown.append) == {"a": {"prefill": 1.0}}
    assert "".join(order) == "abbaa"
    assert shown == ["b failed"]


def test_each_is_compared_with_the_last() -> None:
    shown: list[str] = []
    contestants = [Listed(name, [speed], []) for name, speed in (("a", 9.0), ("b", 12.0), ("c", 10.0))]
    promises = ratios(contestants, [WORKLOAD], ["prefill"], 1.0, 1, shown.append, " here")
    assert promises == [
        Promise("prefill at batch 2 with a beside c here", 0.9, 1.0),
        Promise("prefill at batch 2 with b beside c here", 1.2, 1.0),
    ]
    assert shown == [
        "batch   2 prefill  a 9 tokens/s   c 10 (x 0.90)",
        "batch   2 prefill  b 12 tokens/s   c 10 (x 1.20)",
    ]


def test_speeds_are_compared_with_the_first() -> None:
    speeds = {"tk": {"decode": 90.0}, "x": {"decode": 60.0}, "y": {"decode": 100.0}}
    assert compared(speeds, "decode") == "tk 90 tokens/s   x 60 (x 1.50)   y 100 (x 0.90)"
    assert best_of(speeds, "decode", ["x", "y", "absent"]) == 100.0
    assert best_of(speeds, "decode", ["absent"]) is None


@pytest.mark.parametrize(
    ("promise", "line"),
    [
        (Promise("a", 1.2, 1.2), "a: 1.20, promised at least 1.2: kept"),
        (Promise("b", 0.9, 1.2), "b: 0.90, promised at least 1.2: MISSED by 25%"),
        (Promise("c", 1.5, 1.5, most=True), "c: 1.50, promised at most 1.5: kept"),
        (Promise("d", 1.8, 1.5, most=True), "d: 1.80, promised at most 1.5: MISSED by 20%"),
    ],
)
def test_promises_say_how_they_were_kept(promise: Promise, line: str) -> None:
    assert promise.line() == line
    assert promise.is_kept == line.endswith("kept")
