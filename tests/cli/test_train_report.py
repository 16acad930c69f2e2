"""The end of `tk train`: its result, and the commands that come next."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tk.cli.main import main
from tk.tests.checkpoint.crashing import save
from tk.tests.cli.small_run import CONFIG
from tk.train.launch import launcher

METRICS = (
    {"step": 1, "loss": 5.0, "tokens": 96},
    {"step": 2, "eval_loss": 4.5, "eval_perplexity": 90.0},
    {"step": 3, "loss": 4.0, "tokens": 288},
    {"step": 3, "eval_loss": 4.25, "eval_perplexity": 70.125},
)


class Ranks:
    """A launcher whose ranks have saved some steps when it returns."""

    steps, code = 3, 0

    def __init__(self, module: str, arguments: Sequence[str], *others: Any) -> None:
        self.folder = Path(json.loads(arguments[0])["checkpoint"]["dir"])

    def run(self) -> int:
        if self.steps:
            save(self.folder, range(self.steps, self.steps + 1))
            lines = [json.dumps(line) for line in METRICS if int(line["step"]) <= self.steps]
            (self.folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
        return self.code


@pytest.fixture
def config(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a configuration, for ranks that are not started."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "Launcher", Ranks)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(run="my run", folder=tmp_path, corpus=corpus))
    return str(path)


def test_a_run_ends_with_its_result_and_the_next_commands(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--nproc", "1", "--set", "train.steps=3"]) == 0
    said, run = capsys.readouterr(), tmp_path / "my run"
    assert said.out.startswith(f"{run}/step-00000003: step 3 of 3, loss 4.000, held-out loss 4.250, in ")
    assert said.err.splitlines() == [
        "Next:",
        f"  tk serve '{run}'",
        f"  tk train {config} --nproc 1 --set train.steps=6  # trains on",
    ]


def test_a_run_that_was_stopped_says_how_it_goes_on(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "steps", 2)
    monkeypatch.setattr(Ranks, "code", 130)
    assert main(["train", config, "--set", "optimizer.lr=1e-3"]) == 130
    said = capsys.readouterr()
    assert "step 2 of 3, loss 5.000, held-out loss 4.500, in " in said.out
    assert said.err == f"Next:\n  tk train {config} --set optimizer.lr=1e-3  # goes on from step 2\n"
    monkeypatch.setattr(Ranks, "steps", 3)
    monkeypatch.setattr(Ranks, "code", 1)
    assert main(["-q", "train", config]) == 1
    assert capsys.readouterr().err == ""


def test_an_older_evaluation_is_not_that_of_the_newest_step(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "METRICS", METRICS[:3])
    assert main(["train", config]) == 0
    assert "step 3 of 3, loss 4.000, in " in capsys.readouterr().out


def test_the_last_line_of_json_is_the_result(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--json"]) == 0
    said = capsys.readouterr()
    (result,) = map(json.loads, said.out.splitlines())
    assert result.pop("seconds") > 0
    assert result == {
        "event": "result",
        "run": str(tmp_path / "my run"),
        "checkpoint": str(tmp_path / "my run" / "step-00000003"),
        "step": 3,
        "steps": 3,
        "loss": 4.0,
        "eval_loss": 4.25,
        "eval_perplexity": 70.125,
        "tokens": 288,
    }
    assert said.err == ""


def test_a_run_without_a_step_has_no_result(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "steps", 0)
    assert main(["train", config]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_plan_in_json_is_one_document(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--dry-run", "--json"]) == 0
    planned = capsys.readouterr().out
    assert main(["plan", config, "--json"]) == 0
    assert json.loads(planned).items() <= json.loads(capsys.readouterr().out).items()
