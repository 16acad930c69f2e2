"""Engines as contestants."""

import pytest

from tk.benchmarks.peers.token_clock import NotTogether, Workload
from tk.benchmarks.serving.engines import EngineContestant
from tk.infer import LLM

TOGETHER = (0.0, [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
APART = (0.0, [[1.0, 2.0], [3.0, 4.0]])


def contestant(monkeypatch: pytest.MonkeyPatch, apart: int) -> EngineContestant:
    """Returns a contestant without an engine, whose sequences do not run together in its first runs."""
    runs = iter([APART] * apart + [TOGETHER] * 5)
    monkeypatch.setattr(EngineContestant, "_run", lambda *_: next(runs))
    return EngineContestant("tk", object.__new__(LLM))


def test_sequences_that_did_not_run_together_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(2, 4, 3)
    assert contestant(monkeypatch, apart=4).run(workload) == {"prefill": 8.0, "decode": 2.0}
    with pytest.raises(NotTogether):
        contestant(monkeypatch, apart=5).run(workload)
