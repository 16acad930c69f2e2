"""The pool of ranks: jobs side by side, and ranks that fail, die or stop answering."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk.parity.pool import Outcome, Pool, PoolJob


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool(4, "tk.tests.parity.light_rank", tmp_path, silence_seconds=60.0) as pool:
        yield pool


def run(pool: Pool, *jobs: tuple[str, int], groups: str = "g") -> list[Outcome]:
    return list(pool.run([PoolJob(f"job {n}", {"do": do}, size, groups) for n, (do, size) in enumerate(jobs)]))


def test_ranks_are_started_once_and_jobs_run_side_by_side(pool: Pool) -> None:
    first = run(pool, *[("answer", 1)] * 6, ("answer", 4), ("answer", 2), ("answer", 2))
    assert [outcome.job.num_ranks for outcome in first] == [1] * 6 + [2] * 2 + [4]
    assert all(not outcome.error for outcome in first)
    assert [answer["rank"] for answer in first[-1].answers] == [0, 1, 2, 3]
    processes = {answer["process"] for answer in first[-1].answers}
    assert {answer["process"] for outcome in first for answer in outcome.answers} == processes
    assert {answer["process"] for answer in run(pool, ("answer", 4))[0].answers} == processes


def test_groups_are_made_anew_for_other_layouts_only(pool: Pool) -> None:
    same = run(pool, ("answer", 4), ("answer", 4))
    other = list(pool.run([PoolJob("a", {"do": "answer"}, 4, "x"), PoolJob("b", {"do": "answer"}, 4, "y")]))
    stores = [outcome.answers[0]["store"] for outcome in [*same, *other]]
    assert stores[0] == stores[1]
    assert len(set(stores)) == 3
    for outcome in same:
        assert len({answer["store"] for answer in outcome.answers}) == 1


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("fail", r"rank 3: ValueError: out of luck \(in .*light_rank.py:\d+\)"),
        ("die", "rank 3: its process ended with code -9"),
        ("wait", "no message from ranks 3 for 0.5 seconds"),
    ],
)
def test_a_lane_whose_rank_fails_gets_new_processes(pool: Pool, action: str, message: str) -> None:
    before = {answer["process"] for answer in run(pool, ("answer", 4))[0].answers}
    pool.silence_seconds = 0.5
    outcomes = pool.run([PoolJob(action, {"do": action}, 4, "g"), PoolJob("next", {"do": "answer"}, 4, "g")])
    bad = next(outcomes)
    pool.silence_seconds = 60.0
    (after,) = outcomes
    assert re.search(message, bad.error)
    assert not after.error
    assert not before & {answer["process"] for answer in after.answers}


def test_a_pool_that_is_left_leaves_no_process(tmp_path: Path) -> None:
    with Pool(2, "tk.tests.parity.light_rank", tmp_path, silence_seconds=60.0) as pool:
        (outcome,) = run(pool, ("answer", 2))
    for answer in outcome.answers:
        with pytest.raises(ProcessLookupError):
            os.kill(answer["process"], 0)
