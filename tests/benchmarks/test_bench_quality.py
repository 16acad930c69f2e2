"""The command that measures quality, on a tiny model."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tk.benchmarks import bench_quality
from tk.benchmarks.quality.cases import CASES
from tk.benchmarks.quality.results import QualityResults
from tk.tests.infer.serve.tiny_model import write_tiny_model

SMALL = ("--context", "64", "--prose", "150", "--code", "100", "--round", "2")


def run(*arguments: str) -> list[str]:
    """Runs the command; returns the lines that it printed."""
    result = CliRunner().invoke(bench_quality.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.matrix
def test_cases_are_measured_once_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_quality, "python_if_possible", lambda peer: None)
    model, out = write_tiny_model(tmp_path / "model"), tmp_path / "out"
    arguments = ("--model", str(model), "--out", str(out), *SMALL, "--only", "fp32", "--only", "permuted")
    lines = run(*arguments)
    assert lines[-2] == "permuted, llama.cpp Q4_1   not measured"
    assert "248 tokens" in lines[-1], "4 windows, and 1 of 3 tokens and of 2"
    stored = (out / "results.jsonl").read_text()
    assert len(stored.splitlines()) == 2 * 5
    assert run(*arguments) == lines[-3:]
    assert (out / "results.jsonl").read_text() == stored
    outliers = run(*arguments[:-4], "--only", "outliers, fp32", "--only", "fp32")
    assert "+0.000%" in outliers[-2]
    assert outliers[-1].startswith("perplexity of outliers, fp32 beside fp32: 1.00, promised at most 1.00001: kept")


def test_the_peer_gets_the_windows_and_its_losses_are_kept(tmp_path: Path) -> None:
    peer = tmp_path / "peer"
    peer.write_text('#!/bin/sh\necho "$@" > ' + f'{tmp_path}/arguments\ncat > {tmp_path}/windows\necho "[2.0, 4.0]"\n')
    peer.chmod(0o755)
    [case] = [case for case in CASES if case.peer]
    results = QualityResults(tmp_path / "results.jsonl")
    measurer = bench_quality.QualityMeasurer({case.model: tmp_path / "model"}, peer, 1, results)
    measurer.by_peer(case, {3: [1, 2, 3], 5: [4, 5]})
    assert (tmp_path / "windows").read_text() == "[[1, 2, 3], [4, 5]]"
    assert (tmp_path / "arguments").read_text().split()[2:] == [str(tmp_path / "model"), "Q4_1", "1"]
    assert results.has(case.name, 3)
    assert "3 tokens" in results.line(case)


def test_without_a_trained_model_it_says_so() -> None:
    assert run() == ["Nothing is measured: random weights say nothing about quality; give a trained model (--model)."]
