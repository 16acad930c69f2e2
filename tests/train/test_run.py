"""`tk train` as a process: signals, resume, and its messages when something is wrong."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.checkpoint.run.run_folder import RunFolder
from tk.cli.main import main
from tk.core.config import parse
from tk.core.errors import CheckpointError, TkError
from tk.tests.limited import limited
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.tests.train.train_processes import DEADLINE, children_of, losses_of, metrics_of, wait_for_step
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

WriteToml = Callable[..., Path]
Run = Callable[..., tuple[int, str]]
pytestmark = pytest.mark.slow
TK: Final = (sys.executable, "-P", "-m", "tk")


def _start(*arguments: str, tk: Sequence[str] = TK) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*tk, "train", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`tk train ARGUMENTS` in this process, which starts the ranks: returns its exit code and the stderr of all.

    A module in the current folder has the name of one of Python's; ranks must not import it.
    """
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        return main(["train", *arguments]), capfd.readouterr().err

    return run


def _train(config: dict[str, Any], resume: str = "auto") -> None:
    """A run of one rank in this process, from where the last one ended: one whose process is not the subject."""
    Trainer(parse(config, TrainConfig, "test"), resume=resume).fit()


def test_ctrl_c_saves_and_the_resumed_run_is_bit_equal(
    rank_pool: RankPool, configure: Configure, write_toml: WriteToml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the pool's ranks have
    sections: dict[str, Any] = {"train": {"steps": 30}, "parallel": {"tp": 2, "dp": 1}, "zero": {"stage": 1}}
    rank_pool.run(run_training, 2, config=configure("whole", **sections))
    process = _start(str(write_toml(configure("stopped", **sections))), "--json", "--log-format", "json")
    wait_for_step(tmp_path / "stopped", 5, process)
    process.send_signal(signal.SIGINT)
    printed, logged = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    *events, last = map(json.loads, printed.splitlines())
    steps = [event for event in events if event["event"] == "step"]
    assert steps == [{"event": "step", **line} for line in metrics_of(tmp_path / "stopped")]
    assert (last["event"], last["step"], last["loss"]) == ("result", steps[-1]["step"], steps[-1]["loss"])
    assert [event["path"] for event in events if event["event"] == "saved"][-1] == last["checkpoint"]
    lines = [json.loads(line) for line in logged.splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    assert {line["rank"] for line in lines if line["logger"].startswith("tk.train.records")} == {0}
    stopped_at = Checkpoint.open(tmp_path / "stopped").step
    assert 5 <= stopped_at < 30
    rank_pool.run(run_training, 2, config=configure("stopped", **sections))
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    names = Checkpoint.open(tmp_path / "whole").tensors
    whole_run, resumed = Checkpoint.open(tmp_path / "whole"), Checkpoint.open(tmp_path / "stopped")
    for name in names:
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            same = whole_run.read(name, slot=slot).numpy() == resumed.read(name, slot=slot).numpy()
            assert same.all(), (name, slot)


def test_the_second_ctrl_c_ends_at_once_and_leaves_committed_steps(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    config = write_toml(configure(train={"steps": 100_000}, checkpoint={"every": 3}))
    process = _start(str(config))
    wait_for_step(tmp_path / "run", 8, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    steps = RunFolder(tmp_path / "run").steps()
    assert steps
    for _, path in steps:
        assert not Checkpoint.open(path).verify().problems
    with RunFolder(tmp_path / "run").lock() as locked:
        assert locked.attempt, "it is free again"


@pytest.mark.matrix  # launch/test_launcher.py has ranks without torch; here, too, a rank is stopped
def test_a_killed_rank_ends_the_job_with_its_name(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    config = write_toml(configure(train={"steps": 100_000}, parallel={"dp": 2}))
    process = _start(str(config))
    wait_for_step(tmp_path / "run", 2, process)
    children = children_of(process)
    os.kill(_rank(process, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.search(
        r"Rank 1 of 2 was killed by SIGKILL: rank 1 is at step \d+ in [\w -]+; rank 0 waits at step", errors
    )
    assert not any(Path(f"/proc/{child}").exists() for child in children), "no rank outlives the job"


def test_a_stopped_rank_ends_the_job_within_the_timeout(
    configure: Configure, write_toml: WriteToml, tmp_path: Path
) -> None:
    config = write_toml(configure(train={"steps": 100_000}, parallel={"tp": 2, "timeout_seconds": 6.0}))
    process = _start(str(config))
    wait_for_step(tmp_path / "run", 2, process)
    os.kill(_rank(process, 1), signal.SIGSTOP)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.search(
        r"No progress for 6 seconds.*rank 1 is at step \d+ in [\w -]+; rank 0 waits at step \d+ in", errors
    )
    record = Path(re.search(r"\(flight recorder\) are in (\S+)\.", errors)[1])  # type: ignore[index]
    recorded = json.loads(record.read_bytes())
    assert "Rank 1 sent nothing for 6 seconds" in recorded["ended_by"]


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["train.stepz=3"], 2, "unknown key 'train.stepz'; did you mean 'steps'?"),
        (["parallel.tp=3"], 2, "num_attention_heads % tp = 4 % 3 = 1"),
        (["train.profile=7:3"], 2, 'it must be "A:B", the first and the last step to trace'),
        (["optimizer.lr=fast"], 2, "'optimizer.lr' = 'fast'"),
        (["data.tokenizer=/nowhere"], 3, "[data] tokenizer: /nowhere does not exist"),
        (["train.seq_len=128"], 2, "train.seq_len = 128 exceeds model.max_position_embeddings = 64"),
        pytest.param(  # test_precision.py has it without processes; a rank fails above, too
            ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.schedule=constant"],
            1,
            "must be finite",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_an_error_is_one_paragraph(
    configure: Configure, write_toml: WriteToml, run: Run, tmp_path: Path, overrides: list[str], code: int, message: str
) -> None:
    leftover = tmp_path / "run" / "step-00000001.tmp-0000dead"
    leftover.mkdir(parents=True)
    sets = [word for override in overrides for word in ("--set", override)]
    returned, errors = run(str(write_toml(configure())), *sets)
    assert returned == code
    assert message in errors
    assert "Traceback" not in errors
    assert leftover.exists() == (code != 1), "once ranks have run, nothing half-written is left"


def test_a_missing_config_and_a_wrong_resume_are_refused(configure: Configure, run: Run, tmp_path: Path) -> None:
    code, errors = run(str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml" in errors
    with pytest.raises(CheckpointError, match="does not exist"):
        _train(configure(train={"steps": 2}), str(tmp_path / "absent"))
    _train(configure(train={"steps": 2}))
    with pytest.raises(TkError, match="--resume never") as refused:
        _train(configure(train={"steps": 4}), "never")
    assert refused.value.exit_code == 2
    assert [step for step, _, _ in losses_of(tmp_path / "run")] == [1, 2]


def test_rows_go_on_where_they_were_when_the_batch_size_changes(configure: Configure, tmp_path: Path) -> None:
    _train(configure(train={"steps": 2}, optimizer={"warmup_steps": 2}))
    _train(configure(train={"steps": 4, "global_batch_size": 3}, optimizer={"warmup_steps": 2}))
    assert Checkpoint.open(tmp_path / "run").resume["samples"] == 2 * 6 + 2 * 3


def _rank(process: subprocess.Popen[str], rank: int) -> int:
    """The process id of a rank that `process` started."""
    variable = f"RANK={rank}\0".encode()
    return next(int(child) for child in children_of(process) if b"\0" + variable in _environment(child))


def _environment(process: str) -> bytes:
    return b"\0" + Path(f"/proc/{process}/environ").read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_failing_disk_is_reported_and_leaves_no_debris(
    configure: Configure, write_toml: WriteToml, tmp_path: Path, interrupt: bool
) -> None:
    steps, tp = (100_000, 2) if interrupt else (2, 1)
    config = write_toml(configure(train={"steps": steps}, parallel={"tp": tp}, checkpoint={"async_save": False}))
    process = _start(str(config), tk=limited(resource.RLIMIT_FSIZE, 50_000))
    if interrupt:
        wait_for_step(tmp_path / "run", 2, process)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was not saved" in errors
    assert "File too large" in errors
    assert not list((tmp_path / "run").glob("step-*"))


def train_on_a_failing_disk(config: dict[str, Any]) -> str:
    """The error of a run on this rank, whose files cannot be large."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        run_training(config)
    except TkError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def test_every_rank_ends_with_the_error_of_a_failing_disk(
    rank_pool: RankPool, configure: Configure, tmp_path: Path
) -> None:
    config = configure(train={"steps": 2}, parallel={"tp": 2, "dp": 1}, checkpoint={"async_save": False})
    first, second = rank_pool.run(train_on_a_failing_disk, 2, config=config)
    assert "was not saved" in first
    assert "File too large" in first
    assert "was not saved" in second
    assert "File too large" in second or "Rank 0 removes it when it cannot save the step" in second
    assert not RunFolder(tmp_path / "run").steps()
    assert not list((tmp_path / "run").rglob("*.safetensors")), "each rank removes its files, so the disk is no fuller"


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
    assert not metrics_of(tmp_path / "run")


def test_profiled_steps_leave_a_trace(configure: Configure, tmp_path: Path) -> None:
    events = {}
    for name, steps in (("two", "2:3"), ("five", "2:9")):  # the second ends with the run, after step 6
        _train(configure(name, train={"steps": 6, "profile": steps}))
        events[name] = json.loads((tmp_path / name / "logs" / "trace-rank-0.json").read_text())["traceEvents"]
    updates = {name: sum(event["name"] == "ShardedAdamW.step" for event in found) for name, found in events.items()}
    assert updates == {"two": 2, "five": 5}


def test_fork_moves_newer_steps_and_sigterm_saves_and_exits_0(
    configure: Configure, write_toml: WriteToml, run: Run, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"optimizer": {"warmup_steps": 3}}
    config = str(write_toml(configure(train={"steps": 100_000}, **sections)))
    _train(configure(train={"steps": 3}, checkpoint={"every": 1}, **sections))
    code, errors = run(config, "--fork")
    assert code == 2
    assert "--fork needs a checkpoint to fork from" in errors
    process = _start(config, "--resume", str(tmp_path / "run" / "step-00000001"), "--fork")
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "steps after 1 are now in" in errors
    assert "changed train.steps: 3 -> 100000" in errors
    assert re.search(r"saved \S+/step-\d{8}: .* in .*s\n", errors)
    assert re.match(r"\S+/step-\d{8}: step \d+ of 100000, loss ", printed)
    assert f"Next:\n  tk train {config}  # goes on from step " in errors
    assert len(list(tmp_path.glob("run/forked-*/step-*"))) == 2
    (first, _), (last, _) = RunFolder(tmp_path / "run").steps()
    assert first == 1
    assert last >= 5


def test_dry_run_starts_nothing(configure: Configure, write_toml: WriteToml, tmp_path: Path) -> None:
    process = _start(str(write_toml(configure(parallel={"tp": 2}))), "--dry-run", "--nproc", "4")
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "tp 2 x dp 2 = 4 ranks" in output
    assert not (tmp_path / "run").exists()
