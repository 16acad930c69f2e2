"""The threads of a rank: as the environment says, else its share of the cores."""

import os

import pytest

from tk.infer.engine import job as job_module
from tk.infer.engine.job import threads_per_rank


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("4,2", 4), ("", 2), ("0", 2), ("many", 2)])
def test_the_environment_wins_over_the_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_per_rank(2) == threads
    assert threads_per_rank(2, 7) == 7


def test_a_rank_has_no_more_threads_than_cores_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(job_module, "numa_nodes", lambda: (frozenset(range(8)), frozenset(range(8, 12))))
    assert threads_per_rank(2, numa=True) == 4
    assert threads_per_rank(1, numa=True) == 8
    assert threads_per_rank(2) == 6
    assert threads_per_rank(2, 5, numa=True) == 5


def test_every_rank_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(10**6) == 1
