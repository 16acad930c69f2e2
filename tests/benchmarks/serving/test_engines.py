"""Engines as contestants."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tk.benchmarks.peers.token_clock import NotTogether, SpeedWorkload
from tk.benchmarks.serving.engines import EngineContestant, engine
from tk.infer import LLM
from tk.infer.engine.request.events import Event
from tk.infer.engine.request.request import Request
from tk.tests.infer.serve.tiny_model import write_tiny_model

TOGETHER = (0.0, [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
APART = (0.0, [[1.0, 2.0], [3.0, 4.0]])


def contestant(monkeypatch: pytest.MonkeyPatch, apart: int) -> EngineContestant:
    """Returns a contestant without an engine, whose sequences do not run together in its first runs."""
    runs = iter([APART] * apart + [TOGETHER] * 5)
    monkeypatch.setattr(EngineContestant, "_run", lambda *_: next(runs))
    return EngineContestant("tk", object.__new__(LLM))


def test_sequences_that_did_not_run_together_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = SpeedWorkload(2, 4, 3)
    assert contestant(monkeypatch, apart=4).run(workload) == {"prefill": 8.0, "decode": 2.0}
    with pytest.raises(NotTogether):
        contestant(monkeypatch, apart=5).run(workload)


@pytest.mark.parametrize(("seed", "are_equal"), [(0, True), (None, False)])
def test_a_seed_gives_every_run_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None, are_equal: bool
) -> None:
    with engine("tk", write_tiny_model(tmp_path), threads=1) as opened:
        prompts: list[tuple[int, ...]] = []
        submit = opened.llm.engine.submit

        def recorded(request: Request, emit: Callable[[Event], None]) -> None:
            prompts.append(request.token_ids)
            submit(request, emit)

        monkeypatch.setattr(opened.llm.engine, "submit", recorded)
        contestant = EngineContestant("tk", opened.llm, prompt_seed=seed)
        for _ in range(2):
            contestant.run(SpeedWorkload(2, 40, 1))
    assert prompts[0] != prompts[1]  # within a run
    assert (prompts[:2] == prompts[2:4]) == are_equal
