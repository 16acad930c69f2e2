"""Readers of a run never lose to its pruning: a step that is read stays, and one that vanished is looked for again."""

import gc
import threading
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, reshard
from tk.checkpoint.files import locks
from tk.checkpoint.read.run_steps import newest_step
from tk.checkpoint.read.step_folder import StepFolder
from tk.checkpoint.read.step_lease import StepLease
from tk.checkpoint.run import run_lock
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.tests.checkpoint.crashing import assert_is_step, save
from tk.tests.checkpoint.disturbances import disturbed


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


def test_a_step_that_is_read_is_pruned_later(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2), keep=1)
    readers = [Checkpoint.open(tmp_path), Checkpoint.open(tmp_path / "step-00000001")]
    save(tmp_path, range(2, 4), keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert all(reader.verify().ok for reader in readers)
    del readers
    gc.collect()
    save(tmp_path, range(4, 5), keep=1)
    assert names(tmp_path) == ["step-00000004"]


def test_a_lease_ends_although_the_checkpoint_lives(tmp_path: Path) -> None:
    """As a server's, whose engine has ended: otherwise a run keeps every step that was ever served."""
    save(tmp_path, range(1, 2), keep=1)
    reader = Checkpoint.open(tmp_path)
    for _ in range(2):
        reader.folder.end_lease()
    save(tmp_path, range(2, 3), keep=1)
    assert names(tmp_path) == ["step-00000002"]
    assert reader.step == 1


def test_no_lease_of_a_step_that_is_gone_or_being_pruned(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2))
    step = tmp_path / "step-00000001"
    assert StepLease.take(step)
    gc.collect()
    with locks.unread_folder(step) as unread:
        assert unread
        assert StepLease.take(step) is None
    assert StepLease.take(tmp_path / "step-00000002") is None


def test_readers_beside_a_run_that_prunes_at_every_step(tmp_path: Path) -> None:
    """Ten readers of everything, while new steps push out the old ones."""
    run = tmp_path / "run"
    save(run, range(1, 2), keep=1)
    over = threading.Event()

    def train() -> None:
        step = 1
        while not over.is_set():
            step += 1
            save(run, range(step, step + 1), keep=1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        opened = 0
        seen = set[int]()
        while opened < 10 or len(seen) < 3:
            assert thread.is_alive()
            checkpoint = Checkpoint.open(run)
            seen.add(checkpoint.step)
            assert_is_step(checkpoint.path, checkpoint.step)
            opened += 1
        copied = Checkpoint.open(reshard(run, tmp_path / "copy", layout=Layout(tp=4)))
        assert_is_step(copied.path, copied.step)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("at", [0, *range(1, 25, 4)])
def test_a_step_that_vanishes_while_it_is_opened_is_looked_for_again(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without locks, or beside a job of another host."""
    monkeypatch.setattr(locks, "_flock", lambda fd, kind: None)
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.0)
    run = tmp_path / "run"
    save(run, range(1, 2), keep=1)

    def train(step: int = 2) -> None:
        save(tmp_path / "new", range(step, step + 1), keep=1)
        (tmp_path / "new" / f"step-0000000{step}").rename(run / f"step-0000000{step}")
        (run / "step-00000001").rename(run / "step-00000001.trash-0000dead")

    with disturbed(at, train):
        checkpoint = Checkpoint.open(run)
    assert checkpoint.step == 2 or not (run / "step-00000001").exists()
    assert Checkpoint.open(run).step == 2


def test_a_run_whose_every_step_vanishes_is_given_up(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2))

    def vanish(step: Path) -> StepFolder:
        step.rename(step.with_name("away"))
        (tmp_path / "away").rename(tmp_path / f"step-0000000{int(step.name[-1]) % 9 + 1}")
        raise CheckpointError("It is gone.")

    with pytest.raises(CheckpointError, match="vanished while it was opened, 20 times"):
        newest_step(tmp_path, open_step=vanish)
