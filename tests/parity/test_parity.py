"""`tk parity` as a whole: it passes right layouts, finds a wrong one, keeps results and reports correct numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tk.cli.main import command_group
from tk.core.errors import ConfigError
from tk.parity.gradients import compare_gradients, first_gradients, relative_differences
from tk.parity.judge import BOUNDS, Result, common_start, compare_curves, worst_first
from tk.parity.layout import ParityLayout
from tk.parity.report import ParityReport
from tk.parity.results_file import ResultsFile
from tk.parity.run import ParityRun
from tk.parity.subject import Subject
from tk.train.trainer import Trainer

FP32 = BOUNDS["fp32"]
GOOD = Result(ParityLayout(tp=2), 1e-7, 1e-6, 4e-7, "model.norm.weight", seconds=1.5)
WRONG = Result(ParityLayout(dp=2), 1e-7, 3e-4, 4e-7, "model.norm.weight", seconds=0.5)
DEAD = Result(ParityLayout(pp=2), error="rank 1: its process ended with code -9", seconds=2.0)
LAYOUTS = """
[[layouts]]
tp = 4
sequence_parallel = true
kv_heads = "fewer than tp"
[[layouts]]
tp = 2
dp = 2
zero = 3
tied = true
[[layouts]]
pp = 2
dp = 2
zero = 2
schedule = "interleaved"
num_virtual_stages = 2
[[layouts]]
dp = 2
zero = 1
[[layouts]]
dp = 4
zero = 2
shard_size = 1
[[layouts]]
dp = 4
zero = 3
shard_size = 2
foreign = true
"""


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_group(), ["parity", *words])
    return result.exit_code, result.stdout


def test_layouts_give_the_model_of_one_process_and_results_are_kept(tmp_path: Path) -> None:
    (tmp_path / "layouts.toml").write_text(LAYOUTS)
    words = ["--layouts", str(tmp_path / "layouts.toml"), "--steps", "4", "--nproc", "4"]
    words += ["--resume", str(tmp_path / "results.jsonl"), "-o", str(tmp_path / "page.md"), "--json"]
    code, output = invoke(*words)
    assert code == 0, output
    document = json.loads(output)
    assert set(document) == {"layouts"}
    assert len(document["layouts"]) == 6
    for entry in document["layouts"]:
        assert 0 <= entry["loss"] <= 1e-5
        assert 0 <= entry["grad_norm"] <= 1e-4
        assert 0 <= entry["gradients"] <= 1e-5
    assert max(entry["gradients"] for entry in document["layouts"]) > 0, "other sums, other rounding"
    page = (tmp_path / "page.md").read_text()
    assert "6 of 6 layouts give the model of one process" in page
    assert "| zero | 3 | 2 | 0 |" in page
    assert f"--steps 4 --nproc 4 --resume {tmp_path}" in page

    seconds = [entry["seconds"] for entry in document["layouts"]]
    again = json.loads(invoke(*words)[1])
    assert [entry["seconds"] for entry in again["layouts"]] == seconds, "nothing was run again"


def test_a_wrong_layout_is_seen(tmp_path: Path) -> None:
    subject = Subject.built_in(tmp_path, 2, "fp32")
    subject.prepare(tmp_path)
    layouts = [ParityLayout(tp=2), ParityLayout(tp=2, sequence_parallel=True)]
    results = {r.layout: r for r in ParityRun(subject, tmp_path, 2, "tk.tests.parity.broken_rank").run(layouts)}
    right, wrong = (results[layout] for layout in layouts)
    assert right.badness(FP32) < 1
    # Norms that differ over ranks drift apart; before that their gradients are a part of what they should be.
    assert wrong.badness(FP32) > 1
    assert "norm" in wrong.error or "norm" in wrong.parameter


def with_experts(folder: Path, steps: int) -> Subject:
    subject = Subject.built_in(folder, steps, "fp32")
    model = subject.base.model.model_copy(update={"architecture": "mixtral", "num_local_experts": 4})
    subject = Subject(subject.base.model_copy(update={"model": model}), varies_model=True)
    subject.prepare(folder)
    return subject


def test_experts_are_compared_with_their_routing(tmp_path: Path) -> None:
    layouts = [
        ParityLayout(tp=2, sequence_parallel=True, recompute="full"),
        ParityLayout(dp=2, zero=3),
        ParityLayout(pp=2, schedule="zb-h1"),
    ]
    run = ParityRun(with_experts(tmp_path, 4), tmp_path, 2)
    results = list(run.run(layouts))
    assert len(results) == 3
    for result in results:
        assert result.badness(FP32) < 1
        assert result.routing_changed == 0
    for reference in run.references.values():
        assert 0 not in reference.routing
        assert len(set(reference.routing)) == 4, "tokens of four batches go where others went"


@pytest.mark.parametrize("step", [3, pytest.param(11, marks=pytest.mark.matrix)])
def test_a_token_that_goes_to_another_expert_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setenv("TK_TEST_WANDERS_IN", str(step))
    run = ParityRun(with_experts(tmp_path, 12), tmp_path, 2, "tk.tests.parity.wandering_rank")
    (result,) = run.run([ParityLayout(tp=2)])
    report = ParityReport([result], FP32, 12, "fp32")
    assert result.routing_changed == step
    assert Result.from_json(result.to_json()) == replace(result, seconds=round(result.seconds, 3))
    if step == 3:
        assert report.failed == [result]
        assert "another expert in step 3; the first 10 steps must have the routing" in report.remarks()[0]
    else:
        assert not report.failed
        assert "another expert than one process did, first in step 11" in report.remarks()[0]


def test_a_token_that_went_elsewhere_late_is_a_remark_and_no_failure() -> None:
    report = ParityReport([replace(GOOD, routing_changed=11), GOOD], FP32, 12, "fp32")
    assert not report.failed
    assert report.remarks() == [
        "1 layouts sent a token to another expert than one process did, first in step 11; each is compared up to there."
    ]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("alone")
    subject = Subject.built_in(folder, 1, "fp32")
    subject.prepare(folder)
    trainer = Trainer(subject.config(ParityLayout(tied=True)))
    trainer.step()
    return trainer


def test_a_gradient_that_differs_is_found_and_named(trainer: Trainer) -> None:
    buffers, table = trainer.engine.buffers, trainer.table
    expected = first_gradients(buffers, table)
    assert np.isfinite(expected).all()
    assert np.linalg.norm(expected) > 0
    assert compare_gradients(buffers, table, expected)["gradients"] == 0
    name = "model.layers.1.mlp.down_proj.weight"
    sizes = {spec.name: math.prod(spec.shape) for spec in trainer.table if not spec.alias}
    start = sum(sizes[before] for before in list(sizes)[: list(sizes).index(name)])
    here = slice(start, start + sizes[name])
    other = expected.copy()
    other[here] *= 1.001
    found = compare_gradients(buffers, table, other)
    norm, total = np.linalg.norm(other[here]), np.linalg.norm(other)
    assert found["parameter"] == name
    assert found["gradients"] == pytest.approx(0.001 / 1.001 * norm / (norm + 0.01 * total), rel=1e-3)
    other[here] = np.nan
    assert compare_gradients(buffers, table, other)["gradients"] == math.inf


def test_differences_are_relative_to_the_parameter_and_a_little_to_all() -> None:
    assert relative_differences([1e-5, 0.0], [1.0, 0.0]) == [1e-5 / 1.01, 0.0]
    # The rule |g - g0| <= 1e-5 |g0| + 1e-7 |G|, at its edge.
    norms = [3.0, 0.04]
    edge = [1e-5 * norm + 1e-7 * math.hypot(*norms) for norm in norms]
    assert relative_differences(edge, norms) == pytest.approx([1e-5, 1e-5], rel=1e-9)
    assert compare_curves([2.0, 3.0], [2.0, 4.0]) == 0.25
    assert [common_start(mine, [1.0, 2.0]) for mine in ([1.0, 2.0], [1.0, 3.0], [0.0, 2.0])] == [2, 1, 0]


def test_the_worst_come_first_and_errors_before_them() -> None:
    assert worst_first([GOOD, DEAD, WRONG], FP32) == [DEAD, WRONG, GOOD]
    report = ParityReport([GOOD, DEAD, WRONG], FP32, 10, "fp32")
    assert report.failed == [DEAD, WRONG]
    assert report.verdict == "2 of 3 layouts differ from one process."
    assert report.rows(1) == report.rows(2), "those that failed are always shown"
    assert ("dp", "2", "1", "1", "1.0e-07", "3.0e-04", "4.0e-07") in report.axis_rows()
    assert f"- {DEAD.layout}: rank 1: its process" in report.page(["tk", "parity"])
    assert ParityReport([GOOD], FP32, 10, "fp32").failed == []
    assert ParityReport([replace(GOOD, gradients=None)], FP32, 10, "fp32").failed
    assert not ParityReport([replace(WRONG, gradients=None)], BOUNDS["bf16"], 10, "bf16").failed, "bf16 judges the loss"


def test_results_are_read_back_but_for_failures_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, {"steps": 10}) as results:
        for result in (GOOD, DEAD, WRONG):
            results.add(result)
    path.write_text(path.read_text()[:-20])
    with ResultsFile(path, {"steps": 10}) as results:
        assert results.done == {GOOD.layout: GOOD}
        results.add(WRONG)
    with ResultsFile(path, {"steps": 10}) as results:
        assert set(results.done) == {GOOD.layout, WRONG.layout}
    with pytest.raises(ConfigError, match="other settings"):
        ResultsFile(path, {"steps": 50})
    with pytest.raises(ConfigError, match="Cannot use"):
        ResultsFile(tmp_path, {})
