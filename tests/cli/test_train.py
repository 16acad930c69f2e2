"""`tk train` up to the start of its ranks: refusals, plans, arguments and clean-up."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tk.cli.main import main
from tk.core.errors import TkError
from tk.tests.cli.small_run import CONFIG
from tk.train.launch import gpus, launcher, worker
from tk.train.records.run_events import report_step


@pytest.fixture
def config(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a configuration; no variables of torchrun."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(run="run", folder=tmp_path, corpus=corpus))
    return str(path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every launcher, which starts no ranks and returns 7."""
    calls: list[tuple[Any, ...]] = []

    class Launcher:
        def __init__(self, *arguments: Any) -> None:
            calls.append(arguments)

        def run(self) -> int:
            return 7

    monkeypatch.setattr(launcher, "Launcher", Launcher)
    return calls


def test_ranks_get_the_whole_configuration_and_their_exit_code_is_the_commands(
    config: str, launched: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    assert main(["train", config, "--set", "parallel.tp=2", "--set", "train.steps=5", "--nproc", "4"]) == 7
    ((module, (text, resume, form), num_ranks, logs, *_),) = launched
    assert (module, resume, form, num_ranks) == ("tk.train.launch.rank", "auto", "text", 4)
    assert logs == tmp_path / "run" / "logs"
    passed = json.loads(text)
    assert (passed["parallel"]["tp"], passed["train"]["steps"], passed["model"]["vocab_size"]) == (2, 5, 303)


def test_a_dry_run_prints_the_plan_and_starts_nothing(
    config: str, launched: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--set", "parallel.tp=2", "--nproc", "4", "--dry-run"]) == 0
    assert "tp 2 x dp 2 = 4 ranks" in capsys.readouterr().out
    assert launched == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--fork"], 2, "--fork needs a checkpoint to fork from: pass --resume CKPT instead of 'auto'"),
        (["--fork", "--resume", "never"], 2, "instead of 'never'"),
        (["--nproc", "0"], 2, "0 is not in the range"),
        (["--nproc", "3", "--set", "parallel.tp=2"], 2, "tp"),
        (["--resume", "/nowhere"], 3, "/nowhere does not exist"),
        (["--set", 'data.sources=[{path = "/nowhere"}]'], 2, "/nowhere does not exist. It must be a token folder"),
        (["--deepspeed", "/nowhere.json"], 2, "/nowhere.json"),
    ],
)
def test_an_impossible_run_is_refused_before_any_rank_starts(
    config: str,
    launched: list[tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    assert main(["train", config, *words]) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert launched == []


def test_more_ranks_than_gpus_are_refused_before_any_rank_starts(
    config: str, launched: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    assert main(["train", config, "--nproc", "9"]) == 2
    assert "9 ranks start on this machine, where CUDA_VISIBLE_DEVICES and the driver leave them 8 GPUs" in " ".join(
        capsys.readouterr().err.split()
    )
    assert launched == []


def test_under_torchrun_this_process_is_a_rank(
    config: str, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks: list[tuple[int, str, bool]] = []

    def run_rank(config: Any, resume: str, fork: bool) -> int:
        ranks.append((config.train.steps, resume, fork))
        report_step({"step": 3, "loss": 2.5})
        logging.getLogger("tk.train").warning("a step is damaged")
        return 5

    monkeypatch.setattr(worker, "run_rank", run_rank)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--log-format", "json", "train", config, "--resume", "/step", "--fork", "--json"]) == 5
    assert ranks == [(3, "/step", True)]
    printed, logged = capsys.readouterr()
    assert json.loads(printed) == {"event": "step", "step": 3, "loss": 2.5}, "and rank 0 alone prints the result"
    (line,) = map(json.loads, logged.splitlines())
    assert (line["rank"], line["message"]) == (1, "a step is damaged")
    assert launched == []


def test_deepspeeds_settings_lie_between_the_file_and_the_overrides(
    config: str, launched: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    other = tmp_path / "ds.json"
    other.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}))
    words = ["--deepspeed", str(other), "--set", "zero.stage=1", "--nproc", "2"]
    assert main(["train", config, *words]) == 7
    passed = json.loads(launched[0][1][0])
    assert (passed["zero"]["stage"], passed["optimizer"]["grad_clip"]) == (1, 0.5)


def test_the_folder_of_a_save_that_failed_is_removed(
    config: str, launched: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = tmp_path / "run" / "step-00000002.tmp-00000abc"

    def run(self: Any) -> int:
        leftover.mkdir(parents=True)
        (tmp_path / "run" / "LOCK").touch()
        raise TkError("no room")

    monkeypatch.setattr(launcher.Launcher, "run", run)
    assert main(["train", config]) == 1
    assert not leftover.exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_is_made_in_place_of_a_run_folder_that_was_moved(
    config: str, launched: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    """Nor in a folder of the user's to which its path leads now."""
    (tmp_path / "theirs").mkdir()

    def run(self: Any) -> int:
        if is_link:
            (tmp_path / "run").symlink_to("theirs")
        raise TkError("Step 4 was not saved.")

    monkeypatch.setattr(launcher.Launcher, "run", run)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", config]) == 1
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "run"] == before
    assert (tmp_path / "run").exists() == is_link
