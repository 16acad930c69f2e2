"""Saves of `initialize` in the background: at every ZeRO stage, killed, failing, one after another, at the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tk.checkpoint.read.reader import Checkpoint
from tk.checkpoint.run.run_folder import RunFolder
from tk.checkpoint.save.background_save import BackgroundSaver
from tk.checkpoint.save.state_source import Segments
from tk.core.errors import CheckpointError, TkError, WorkerDied
from tk.tests.example_counts import sized
from tk.tests.rank_pool import RankPool
from tk.train.foreign.model_engine import ModelEngine, initialize

BEGIN = BackgroundSaver.begin


def make_engine(zero: Any = 1, **options: Any) -> ModelEngine:
    """The same model on every rank; at stage 3 in two blocks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6))
    return initialize(module, {"lr": 0.1, "weight_decay": 0.1}, zero=zero, bucket_size=100, **options)


def train_step(engine: ModelEngine, step: int) -> None:
    """On data that is each rank's own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).square().mean())
    assert engine.step()


def values_of(engine: ModelEngine) -> list[float]:
    """All parameters, one after another."""
    state: dict[str, torch.Tensor] = engine.state_dict()
    return torch.cat([value.reshape(-1).float() for value in state.values()]).tolist()


def stopping_begin(saver: BackgroundSaver, step: int, resume: Mapping[str, Any], segments: Segments) -> None:
    """The writer stands still before it sees its order."""
    os.kill(saver.process_id, signal.SIGSTOP)
    BEGIN(saver, step, resume, segments)


def killing_begin(saver: BackgroundSaver, step: int, resume: Mapping[str, Any], segments: Segments) -> None:
    """The writer is gone before it has written anything."""
    stopping_begin(saver, step, resume, segments)
    os.kill(saver.process_id, signal.SIGKILL)


def withholding_begin(saver: BackgroundSaver, step: int, resume: Mapping[str, Any], segments: Segments) -> None:
    """The writer does not hear of the save."""
    saver._in_flight = step


def steps_in(folder: str | Path) -> list[int]:
    return [step for step, _ in RunFolder(Path(folder)).steps()]


def save_and_die(folder: str, go_on: list[int]) -> None:
    """At every stage one step is committed, and rank 1's part of the next is missing when all ranks are killed."""
    for zero in go_on:
        engine = make_engine(zero)
        train_step(engine, 0)
        engine.save(f"{folder}/{zero}")
        train_step(engine, 1)
        engine.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackgroundSaver, "begin", withholding_begin if dist.get_rank() == 1 else BEGIN)
            engine.save(f"{folder}/{zero}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: str, zero: int) -> dict[str, Any]:
    """Goes on from the run folder; beside it, the same steps without a stop."""
    engine, whole = make_engine(zero), make_engine(zero)
    engine.load(folder)
    found = engine.step_count
    train_step(whole, 0)
    for each in (engine, whole):
        train_step(each, 1)
    engine.save(folder, wait=zero < 3)
    engine.close()
    return {"found": found, "values": values_of(engine), "whole": values_of(whole)}


def test_a_save_that_is_killed_in_the_middle_leaves_the_step_before(rank_pool: RankPool, tmp_path: Path) -> None:
    stages = sized((0, 1, 2, 3), (0, 3))  # all whole, and all in shards
    with pytest.raises(AssertionError, match="exit code -9"):
        rank_pool.run(save_and_die, 2, folder=str(tmp_path), go_on=list(stages))
    for zero in stages:
        folder = tmp_path / str(zero)
        assert steps_in(folder) == [1]
        assert list(folder.glob("step-00000002.tmp-*")), "the second save had begun"
        for result in rank_pool.run(resume, 2, folder=str(folder), zero=zero):
            assert result["found"] == 1
            assert result["values"] == result["whole"]
        assert steps_in(folder) == [1, 2]
        assert Checkpoint.open(folder).verify().ok


def save_drifted(folder: str, zero: int, slot: str) -> str:
    """A good step; then a bit of rank 1's turns over before the second save."""
    engine = make_engine(zero, precision="bf16", shard_size=1 if zero == 3 else 0)
    train_step(engine, 0)
    engine.save(folder)
    train_step(engine, 1)
    if dist.get_rank() == 1:
        first = next(iter(engine._engine.buffers.shards))
        of_slot = engine._engine.optimizer.read
        held = engine.module.get_parameter("0.weight") if slot == "weight" else of_slot(slot, first, *first.flat)
        held.data.view(-1).view(torch.int16)[1] ^= 1
    try:
        engine.save(folder)
    except TkError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("zero", "slot"),
    [(0, "exp_avg"), (1, "weight"), (3, "exp_avg"), pytest.param(2, "weight", marks=pytest.mark.matrix)],
)
def test_replicas_that_drifted_are_not_saved(rank_pool: RankPool, tmp_path: Path, zero: int, slot: str) -> None:
    for answer in rank_pool.run(save_drifted, 2, folder=str(tmp_path), zero=zero, slot=slot):
        assert "Step 2 was not saved: replicas that must be bit-equal have drifted apart in" in answer
        assert f"slot {slot}: rank 0 / rank 1 differ" in answer
    assert steps_in(tmp_path) == [1]


def test_the_folder_is_locked_until_the_step_is_committed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Training goes on meanwhile; the state at the save is written."""
    engine, writers = make_engine(), []

    def begin(saver: BackgroundSaver, step: int, resume: Mapping[str, Any], segments: Segments) -> None:
        writers.append(saver.process_id)
        stopping_begin(saver, step, resume, segments)

    monkeypatch.setattr(BackgroundSaver, "begin", begin)
    train_step(engine, 0)
    saved = values_of(engine)
    engine.save(tmp_path / "run")
    train_step(engine, 1)
    assert values_of(engine) != saved
    with pytest.raises(CheckpointError, match="in use by another job"), RunFolder(tmp_path / "run").lock():
        pass
    os.kill(writers[0], signal.SIGCONT)
    engine.close()
    with RunFolder(tmp_path / "run").lock():
        pass
    step = Checkpoint.open(tmp_path / "run")
    found = np.concatenate([step.read(name).numpy().reshape(-1) for name in engine.state_dict()])
    assert found.tolist() == saved
    assert step.resume == {"step": 1, "loss_scale": {}}


def test_saves_in_a_row(tmp_path: Path) -> None:
    """Into one folder and into another, none waited for but by the next."""
    engine = make_engine()
    for step, folder in enumerate(("a", "a", "b", "a")):
        train_step(engine, step)
        engine.save(tmp_path / folder, keep=2)
    with pytest.raises(CheckpointError, match="step-00000004 is a good checkpoint and is not overwritten"):
        engine.save(tmp_path / "a")
    assert (steps_in(tmp_path / "a"), steps_in(tmp_path / "b")) == ([2, 4], [3])
    engine.save(tmp_path / "c", wait=True)
    assert steps_in(tmp_path / "c") == [4], "committed when it returned"
    engine.close()
    engine.close()


@pytest.mark.parametrize(
    "notice",
    [lambda engine, path: engine.save(path), lambda engine, path: engine.load(path), lambda engine, _: engine.close()],
    ids=["save", "load", "close"],
)
def test_the_error_of_a_save_is_raised_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notice: Callable[[ModelEngine, Path], None]
) -> None:
    engine = make_engine()
    train_step(engine, 0)
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundSaver, "begin", killing_begin)
        engine.save(tmp_path / "run")
    with pytest.raises(WorkerDied, match="Step 1 was not saved: the process that writes rank 0's checkpoints was"):
        notice(engine, tmp_path / "run")
    engine.save(tmp_path / "run")  # it is said once, and the folder is free again
    engine.close()
    assert steps_in(tmp_path / "run") == [1]


def lose_the_writer_of_rank_0(folder: str) -> str:
    """The error that this rank gets of it; then all go on together."""
    engine = make_engine()
    train_step(engine, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundSaver, "begin", killing_begin if dist.get_rank() == 0 else BEGIN)
        engine.save(folder)
    try:
        engine.save(folder)
    except TkError as error:
        engine.save(folder, wait=True)
        return str(error)
    return "saved"


def test_every_rank_raises_the_error_of_one_writer(rank_pool: RankPool, tmp_path: Path) -> None:
    for answer in rank_pool.run(lose_the_writer_of_rank_0, 2, folder=str(tmp_path)):
        assert "Step 1 was not saved: the process that writes rank 0's checkpoints was killed" in answer
    assert steps_in(tmp_path) == [1]


SCRIPT = """
import atexit, os, signal, sys
from tk.core.process import lasting_imports
with lasting_imports():
    from tk.checkpoint.save.background_save import BackgroundSaver
    from tk.tests.train.saving import test_checkpointer as t

good, bad, writers = t.make_engine(), t.make_engine(), []

def begin(saver, step, resume, segments):
    writers.append(saver.process_id)
    t.stopping_begin(saver, step, resume, segments)

BackgroundSaver.begin = begin
for engine, folder in ((good, "good"), (bad, "bad")):
    t.train_step(engine, 0)
    engine.save(os.path.join(sys.argv[1], folder))
os.kill(writers[1], signal.SIGKILL)
atexit.register(os.kill, writers[0], signal.SIGCONT)  # runs before functions that were registered earlier
print(len(t.steps_in(os.path.join(sys.argv[1], "good"))))
"""


def test_the_end_of_the_interpreter_waits_for_the_commit(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout == "0\n", "nothing was committed when the script was through"
    assert steps_in(tmp_path / "good") == [1]
    assert Checkpoint.open(tmp_path / "good").verify().ok
    assert "Step 1 was not saved" in run.stderr, "there is no later call to raise it"
    assert steps_in(tmp_path / "bad") == []
