"""Results that another run goes on with, and what is said of them."""

import math
from pathlib import Path

import pytest

from tk.benchmarks.quality.cases import CASES, COPIES, GIVEN, QualityCase
from tk.benchmarks.quality.results import QualityResults, WindowLoss

BASE = QualityCase("base")
OTHER = QualityCase("other", beside="base", most=1.1)


@pytest.fixture
def results(tmp_path: Path) -> QualityResults:
    """Two windows of 30 and 10 tokens, of which the other case has losses larger by 0.1 and 0.2, and one alone."""
    found = QualityResults(tmp_path / "results.jsonl")
    for window, (tokens, loss, more) in enumerate([(30, 2.0, 0.1), (10, 3.0, 0.2)]):
        found.add(WindowLoss("base", window, tokens, loss))
        found.add(WindowLoss("other", window, tokens, loss + more))
    found.add(WindowLoss("other", 7, 10, 1.0))
    return found


def test_a_case_is_compared_over_the_windows_that_both_have(results: QualityResults) -> None:
    line = results.line(OTHER)
    assert "50 tokens" in line
    assert f"perplexity {math.exp((30 * 2.1 + 10 * 3.2 + 10) / 50):.4f}" in line
    assert f"+{math.exp(0.125) - 1:.3%} (+-2.652%) beside base" in line  # 0.75 and 0.25 of 0.025 and 0.075
    promise = results.promise(OTHER)
    assert promise is not None
    assert promise.found == pytest.approx(math.exp(0.125))
    assert not promise.is_kept


def test_without_a_pair_there_is_no_promise(results: QualityResults) -> None:
    assert results.promise(BASE) is None
    assert results.promise(QualityCase("missing", beside="base", most=1.0)) is None
    assert results.line(QualityCase("missing")) == "missing                    not measured"
    assert results.line(BASE).endswith(f"perplexity {math.exp(2.25):.4f}")


def test_another_run_finds_them(results: QualityResults, tmp_path: Path) -> None:
    again = QualityResults(tmp_path / "results.jsonl")
    assert again.line(OTHER) == results.line(OTHER)
    assert again.has("other", 7)
    assert not again.has("base", 7)


def test_cases_name_others_before_them_and_models_that_exist() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for number, case in enumerate(CASES):
        assert case.beside in names[:number] or (number, case.beside) == (0, "")
        assert case.model == GIVEN or case.model in COPIES
        assert bool(case.peer) != bool(case.options)
