"""A comparison as a whole: it passes right layouts, finds a wrong one and keeps results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tk.cli.main import command_group
from tk.parity.judge import Result
from tk.parity.layout import ParityLayout
from tk.parity.report import ParityReport
from tk.parity.run import ParityRun
from tk.parity.subject import Subject
from tk.tests.parity.test_report import FP32

PAIRS = """
[[layouts]]
tp = 2
sequence_parallel = true
kv_heads = "fewer than tp"
mlp_block = 3
packing = "documents"
[[layouts]]
dp = 2
zero = 3
tied = true
experts = "mixtral"
[[layouts]]
pp = 2
schedule = "interleaved"
num_virtual_stages = 2
window = true
[[layouts]]
dp = 2
zero = 1
shard_size = 1
offload_optimizer = "cpu"
offload_gradients = "disk"
[[layouts]]
dp = 2
zero = 3
offload_optimizer = "disk"
offload_gradients = "cpu"
offload_parameters = "disk"
foreign = true
"""
FOURS = """
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
offload_optimizer = "disk"
offload_gradients = "disk"
schedule = "interleaved"
num_virtual_stages = 2
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


@pytest.mark.parametrize(
    ("num_ranks", "layouts"), [(2, PAIRS), pytest.param(4, FOURS, marks=pytest.mark.matrix)], ids=["2", "4"]
)
def test_layouts_give_the_model_of_one_process_and_results_are_kept(
    tmp_path: Path, num_ranks: int, layouts: str
) -> None:
    (tmp_path / "layouts.toml").write_text(layouts)
    words = ["--layouts", str(tmp_path / "layouts.toml"), "--steps", "4", "--nproc", str(num_ranks)]
    words += ["--resume", str(tmp_path / "results.jsonl"), "-o", str(tmp_path / "page.md"), "--json"]
    code, output = invoke(*words)
    assert code == 0, output
    document = json.loads(output)
    assert set(document) == {"layouts"}
    assert len(document["layouts"]) == 5
    for entry in document["layouts"]:
        assert 0 <= entry["loss"] <= 1e-5
        assert 0 <= entry["grad_norm"] <= 1e-4
        assert 0 <= entry["gradients"] <= 1e-5
        assert 0 <= entry["updates"] <= 1e-5
    for name in ("gradients", "updates"):
        assert max(entry[name] for entry in document["layouts"]) > 0, "other sums, other rounding"
    page = (tmp_path / "page.md").read_text()
    assert "5 of 5 layouts give the model of one process" in page
    assert "| zero | 3 | 2 | 0 |" in page
    assert f"--steps 4 --nproc {num_ranks} --resume {tmp_path}" in page

    seconds = [entry["seconds"] for entry in document["layouts"]]
    again = json.loads(invoke(*words)[1])
    assert [entry["seconds"] for entry in again["layouts"]] == seconds, "nothing was run again"


@pytest.mark.matrix  # test_measure.py has it in ranks that are there already
def test_a_wrong_layout_is_seen(tmp_path: Path) -> None:
    subject = Subject.built_in(tmp_path, 2, "fp32")
    subject.prepare(tmp_path)
    layouts = [ParityLayout(tp=2), ParityLayout(tp=2, sequence_parallel=True)]
    results = {r.layout: r for r in ParityRun(subject, tmp_path, 2, "tk.tests.parity.broken_rank").run(layouts)}
    right, wrong = (results[layout] for layout in layouts)
    assert right.badness(FP32) < 1
    # Norms that differ over ranks drift apart; before that their gradients are only a part of the right ones.
    assert wrong.badness(FP32) > 1
    assert "norm" in wrong.error or "norm" in wrong.parameter


def with_experts(folder: Path, steps: int) -> Subject:
    subject = Subject.built_in(folder, steps, "fp32")
    model = subject.base.model.model_copy(update={"architecture": "mixtral", "num_local_experts": 4})
    subject = Subject(subject.base.model_copy(update={"model": model}), varies_model=True)
    subject.prepare(folder)
    return subject


@pytest.mark.matrix  # test_layouts.py of tests/train has layouts of experts
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


@pytest.mark.matrix  # test_report.py has the remark without a run
@pytest.mark.parametrize("step", [3, 11])
def test_a_token_that_goes_to_another_expert_is_reported(
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
