"""`tk train` as a process: signals, resume, and what it says when something is wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint.reader import Checkpoint
from tk.checkpoint.run_folder import RunFolder
from tk.tests.train.conftest import Configure

WriteToml = Callable[..., Path]
DEADLINE = 120.0


def _start(
    *arguments: str, before: Callable[[], None] | None = None, folder: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tk", "train", *arguments],
        preexec_fn=before,
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _run(*arguments: str, folder: Path | None = None) -> tuple[int, str]:
    process = _start(*arguments, folder=folder)
    _, errors = process.communicate(timeout=DEADLINE)
    return process.returncode, errors


def _metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _losses(run: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in _metrics(run) if "loss" in line]


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not any(line["step"] >= step for line in _metrics(run)):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_saves_and_the_resumed_run_is_bit_equal(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    parallel = {"parallel": {"tp": 2}, "zero": {"stage": 1}}
    whole = write_toml(configure("whole", train={"steps": 60}, **parallel), "whole.toml")
    assert _run(str(whole))[0] == 0
    config = write_toml(configure("stopped", train={"steps": 60}, **parallel), "stopped.toml")
    process = _start(str(config))
    _wait_for_step(tmp_path / "stopped", 5, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    stopped_at = Checkpoint.open(tmp_path / "stopped").step
    assert 5 <= stopped_at < 60
    assert _run(str(config))[0] == 0
    assert _losses(tmp_path / "stopped") == _losses(tmp_path / "whole")
    names = Checkpoint.open(tmp_path / "whole").tensors
    whole_run, resumed = Checkpoint.open(tmp_path / "whole"), Checkpoint.open(tmp_path / "stopped")
    for name in names:
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            same = whole_run.read(name, slot=slot).numpy() == resumed.read(name, slot=slot).numpy()
            assert same.all(), (name, slot)


def test_the_second_ctrl_c_ends_at_once_and_leaves_committed_steps(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    config = write_toml(configure(train={"steps": 100_000}, parallel={"tp": 2}, checkpoint={"every": 3}))
    process = _start(str(config))
    _wait_for_step(tmp_path / "run", 8, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    steps = RunFolder(tmp_path / "run").steps()
    assert steps
    for _, path in steps:
        assert not Checkpoint.open(path).verify().problems
    assert _run(str(config), "--set", f"train.steps={steps[-1][0] + 2}")[0] == 0, "the lock is free again"


def test_sigterm_saves_and_exits_0(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    config = write_toml(configure(train={"steps": 100_000}))
    process = _start(str(config))
    _wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert Checkpoint.open(tmp_path / "run").step >= 2


def test_a_killed_rank_ends_the_job_with_its_name(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    config = write_toml(configure(train={"steps": 100_000}, parallel={"dp": 2}))
    process = _start(str(config))
    _wait_for_step(tmp_path / "run", 2, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    rank_1 = next(child for child in children if b"RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes())
    os.kill(int(rank_1), signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "Rank 1 of 2 was killed by SIGKILL" in errors
    assert not any(Path(f"/proc/{child}").exists() for child in children), "no rank outlives the job"


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["train.stepz=3"], 2, "unknown key 'train.stepz'; did you mean 'steps'?"),
        (["parallel.tp=3"], 2, "num_attention_heads % tp = 4 % 3 = 1"),
        (["optimizer.lr=fast"], 2, "'optimizer.lr' = 'fast'"),
        (["data.tokenizer=/nowhere"], 3, "Cannot read the tokenizer /nowhere/tokenizer.json"),
        (["train.seq_len=128"], 2, "train.seq_len = 128 exceeds model.max_position_embeddings = 64"),
        (["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.schedule=constant"], 1, "must be finite"),
    ],
)
def test_what_is_wrong_is_said_in_one_paragraph(
    configure: Configure, write_toml: WriteToml, tmp_path: Path, overrides: list[str], code: int, message: str
) -> None:
    sets = [word for override in overrides for word in ("--set", override)]
    returned, errors = _run(str(write_toml(configure())), *sets)
    assert returned == code
    assert message in errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "run").glob("step-*")), "nothing half-written"


def test_a_missing_config_and_a_wrong_resume_are_refused(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    code, errors = _run(str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml" in errors
    config = write_toml(configure(train={"steps": 2}))
    code, errors = _run(str(config), "--resume", str(tmp_path / "absent"))
    assert code == 3
    assert "does not exist" in errors
    assert _run(str(config))[0] == 0
    code, errors = _run(str(config), "--resume", "never", "--set", "train.steps=4")
    assert code == 2
    assert "--resume never" in errors
    for change, message in (
        ("train.seq_len=20", "was trained on other data"),
        ("train.seed=7", "train.seed = 0"),
        ("model.rope_theta=77", "has model.rope_theta = 10000.0, and the configuration 77.0"),
    ):
        code, errors = _run(str(config), "--set", change, "--set", "train.steps=4")
        assert code == 2
        assert message in errors
    assert [step for step, _, _ in _losses(tmp_path / "run")] == [1, 2]
    code, errors = _run(str(config))
    assert code == 0
    assert "train.steps = 2 leaves nothing to do" in errors


def test_rows_go_on_where_they_were_when_the_batch_size_changes(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    config = write_toml(configure(train={"steps": 4}))
    assert _run(str(config), "--set", "train.steps=2")[0] == 0
    assert _run(str(config), "--set", "train.global_batch_size=3")[0] == 0
    assert Checkpoint.open(tmp_path / "run").resume["samples"] == 2 * 6 + 2 * 3


def _no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_failing_disk_is_told_and_leaves_no_debris(
    configure: Configure, write_toml: WriteToml, tmp_path: Path, interrupt: bool
) -> None:
    steps = {"steps": 100_000 if interrupt else 4}
    config = write_toml(configure(train=steps, parallel={"tp": 2}, checkpoint={"async_save": False}))
    process = _start(str(config), before=_no_large_files)
    if interrupt:
        _wait_for_step(tmp_path / "run", 2, process)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cannot be saved in" in errors
    assert "File too large" in errors
    assert not list((tmp_path / "run").glob("step-*"))


def test_no_rank_outlives_a_launcher_that_is_killed_while_ranks_start(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    config = write_toml(configure(train={"steps": 100_000}, parallel={"tp": 2}))
    process = _start(str(config))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + DEADLINE
    while len(ranks := children.read_text().split()) < 2:
        assert time.monotonic() < deadline
    process.kill()
    process.communicate()
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.05)
    assert not _metrics(tmp_path / "run")


def test_modules_of_the_current_folder_are_not_imported(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    assert _run(str(write_toml(configure(train={"steps": 1}))), folder=tmp_path)[0] == 0


def test_fork_moves_newer_steps(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    config = str(write_toml(configure(train={"steps": 3}, checkpoint={"every": 1})))
    assert _run(config)[0] == 0
    code, errors = _run(config, "--fork")
    assert code == 2
    assert "--fork needs a checkpoint to fork from" in errors
    code, errors = _run(config, "--resume", str(tmp_path / "run" / "step-00000001"), "--fork")
    assert code == 0
    assert "steps after 1 are now in" in errors
    assert len(list(tmp_path.glob("run/forked-*/step-*"))) == 2
    assert [step for step, _ in RunFolder(tmp_path / "run").steps()] == [1, 2, 3]


def test_dry_run_starts_nothing(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    process = _start(str(write_toml(configure(parallel={"tp": 2}))), "--dry-run", "--nproc", "4")
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "tp 2 x dp 2 = 4 ranks" in output
    assert not (tmp_path / "run").exists()


def test_under_torchrun_it_joins_the_job(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    config = write_toml(configure(train={"steps": 3}, parallel={"tp": 2}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tk"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*command, "train", str(config)], capture_output=True, text=True, env=environment, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    assert [step for step, _, _ in _losses(tmp_path / "run")] == [1, 2, 3]
    assert Checkpoint.open(tmp_path / "run").layout.tp == 2
