"""Saves of a real run: in the background as in place, and where a run may start again."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.checkpoint.run.run_folder import RunFolder
from tk.core.errors import CheckpointError, WorkerDied
from tk.scripts.broken_checkpoints import flip
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer
from tk.train.run.trainer import Trainer
from tk.train.saving.checkpointer import OpenRun


def train(config: dict[str, Any]) -> int:
    """Trains on this rank to the end; the number of child processes left."""
    make_trainer(config).fit()
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_in_the_background_as_in_place(rank_pool: RankPool, configure: Configure, tmp_path: Path) -> None:
    for name, background in (("behind", True), ("in_place", False)):
        config = configure(
            name,
            train={"steps": 5},
            parallel={"dp": 2},
            zero={"stage": 1},
            precision={"params": "bf16"},
            checkpoint={"every": 1, "keep": 3, "async_save": background},
        )
        config["checkpoint"]["dir"] = str(tmp_path / name)
        assert rank_pool.run(train, 2, config=config) == [0, 0], "a writer is still there"
        assert [step for step, _ in RunFolder(tmp_path / name).steps()] == [3, 4, 5]
    for step in (3, 4, 5):
        one, two = (Checkpoint.open(tmp_path / name / f"step-0000000{step}") for name in ("behind", "in_place"))
        assert one.resume == two.resume
        assert one.side_files().keys() == two.side_files().keys()
        assert one.verify().ok
        for tensor, slot in one.chunks:
            same = one.read(tensor, slot=slot).numpy() == two.read(tensor, slot=slot).numpy()
            assert same.all(), (tensor, slot)


def save_and_end(config: dict[str, Any], end: str) -> list[str]:
    """Copies step 1; then the run ends as it should, or fails. The steps on disk before and after the end."""
    seen: list[str] = []
    trainer = make_trainer(config)
    with suppress(KeyError), trainer.checkpointer.open(trainer.save_options()) as run:
        run.saver.save(1, {}, wait=False)
        seen += [path.name for path in Path(config["checkpoint"]["dir"]).glob("step-*")]
        torch.distributed.barrier()
        if end == "failure":
            raise KeyError(end)
    torch.distributed.barrier()
    return seen + [path.name for path in Path(config["checkpoint"]["dir"]).glob("step-*")]


def test_a_copied_save_is_written_only_once_replicas_agree(
    rank_pool: RankPool, configure: Configure, tmp_path: Path
) -> None:
    for end, there in (("orderly", ["step-00000001"]), ("failure", [])):
        config = configure(end, parallel={"dp": 2})
        assert rank_pool.run(save_and_end, 2, config=config, end=end) == [there, there]


def test_a_failed_save_is_raised_at_the_next_save_and_at_the_end(configure: Configure, tmp_path: Path) -> None:
    trainer = make_trainer(configure())
    with pytest.raises(WorkerDied, match="Step 2 was not saved"):
        _lose_a_save(trainer, 2, lambda run: run.saver.save(3, {}, wait=True))
    with pytest.raises(WorkerDied, match="Step 4 was not saved"):
        _lose_a_save(trainer, 4, lambda run: None)
    with pytest.raises(KeyError, match="the first error"):
        _lose_a_save(trainer, 6, _fail)
    assert [step for step, _ in RunFolder(tmp_path / "run").steps()] == [1, 3, 5]


def _fail(run: OpenRun) -> None:
    raise KeyError("the first error")


def _lose_a_save(trainer: Trainer, step: int, then: Callable[[OpenRun], None]) -> None:
    """Saves the step before; has the writer killed while it saves `step`."""
    with trainer.checkpointer.open(trainer.save_options()) as run:
        run.saver.save(step - 1, {}, wait=False)
        writer = run.saver._writer
        assert writer
        writer.wait()
        os.kill(writer.process_id, signal.SIGSTOP)
        run.saver.save(step, {}, wait=False)
        os.kill(writer.process_id, signal.SIGKILL)
        then(run)


def test_starting_again(configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bad steps are quarantined, an older step is refused or forked from, and the metrics follow."""
    run = tmp_path / "run"
    make_trainer(configure(train={"steps": 4}, checkpoint={"every": 1})).fit()
    losses = _losses(run)
    (run / "step-00000004" / "COMMIT").unlink()
    older = str(run / "step-00000001")
    with pytest.raises(CheckpointError, match=r"holds step 3, newer than step 1 of .*another .* dir, or add --fork"):
        make_trainer(configure(train={"steps": 4}), resume=older).fit()
    assert [step for step, _ in RunFolder(run).steps()] == [1, 2, 3, 4], "a refusal moves nothing"

    make_trainer(configure(train={"steps": 2}), resume=older, fork=True).fit()
    assert [step for step, _ in RunFolder(run).steps()] == [1, 2]
    (bad,) = run.glob("step-00000004.bad-*")
    said = caplog.text
    assert "step-00000004 skipped: " in said
    assert bad.name.partition(".")[2] in said
    (forked,) = run.glob("forked-*")
    assert [Checkpoint.open(path).step for path in sorted(forked.iterdir())] == [2, 3]
    assert (run / "LATEST").read_text() == "step-00000002\n"
    assert _losses(run) == losses[:2], "lines after the resumed step were cut, and made again"


def test_damage_that_shows_on_loading_takes_every_rank_to_the_step_before(
    rank_pool: RankPool, configure: Configure, tmp_path: Path
) -> None:
    """The last bit of one rank's optimizer states: metadata and sizes are right."""
    run = tmp_path / "run"
    config = configure(train={"steps": 3}, parallel={"dp": 2}, zero={"stage": 1}, checkpoint={"every": 1})
    rank_pool.run(train, 2, config=config)
    losses = _losses(run)
    path = run / "step-00000003" / "optim-exp_avg_sq-00001.safetensors"
    flip(path, path.stat().st_size - 1)
    rank_pool.run(train, 2, config=config)
    assert _losses(run) == losses, "step 3 was made again from step 2"
    assert Checkpoint.open(run / "step-00000003").verify().ok
    (bad,) = run.glob("step-00000003.bad-*")
    assert not Checkpoint.open(bad).verify().ok


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]
