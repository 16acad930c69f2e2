"""The step from which ranks start: the same on all of them, and nothing is moved before it is loaded."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.checkpoint.read.shared_read import Peers, open_together, share_errors
from tk.checkpoint.run.locked_run import LockedRun
from tk.core.errors import CheckpointError, ConfigError, NotCommitted, StorageError, TkError
from tk.scripts.broken_checkpoints import flip
from tk.tests.checkpoint.crashing import save
from tk.tests.checkpoint.thread_peers import together
from tk.train.saving.resume import Start

RANKS = 3


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LockedRun]:
    """Steps 1 to 4, locked."""
    save(tmp_path / "run", range(1, 5), keep=0)
    with RunFolder(tmp_path / "run").lock() as locked:
        yield locked


def start(
    run: LockedRun, how: Callable[[Start[int]], object], fail: Callable[[int, int], None] = lambda rank, step: None
) -> list[object]:
    """Returns the step from which each rank starts, or the error.

    Rank 1 alone reads tensors; `fail` is called with rank and step.
    """

    def one(peers: Peers) -> object:
        def load(checkpoint: Checkpoint) -> int:
            with share_errors(peers):
                fail(peers.rank, checkpoint.step)
                for tensor, slot in checkpoint.chunks if peers.rank == 1 else ():
                    checkpoint.read(tensor, slot=slot)
            return checkpoint.step

        def from_rank_0(number: int) -> int:
            return int(peers.gather(str(number).encode())[0])

        held = run if peers.rank == 0 else None
        return how(Start(held, run.path, load, peers, from_rank_0))

    return list(together(RANKS, one))


def damage(run: LockedRun, step: int) -> None:
    """Flips a bit of a tensor, which only a read of it finds."""
    path = run.path / f"step-0000000{step}" / "model-00001.safetensors"
    flip(path, path.stat().st_size - 1)


def entries(run: LockedRun) -> list[str]:
    return sorted(os.listdir(run.path))


def test_damage_that_one_rank_finds_on_reading_takes_all_to_the_step_before(
    run: LockedRun, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run, 4)
    (run.path / "step-00000003" / "COMMIT").unlink()
    assert start(run, Start.from_newest) == [2] * RANKS
    said = caplog.text
    assert "step-00000004 skipped: " in said
    assert "model-00001.safetensors: block 0 of model.embed_tokens.weight" in said
    assert "step-00000003 skipped: " in said
    bad = [f"step-0000000{step}.bad-{run.attempt}" for step in (3, 4)]
    assert [name for name in entries(run) if "step" in name] == ["step-00000001", "step-00000002", *bad]


def test_where_no_step_is_good_nothing_moves_and_training_does_not_begin_anew(run: LockedRun) -> None:
    for step in (1, 2, 4):
        damage(run, step)
    (run.path / "step-00000003" / "COMMIT").unlink()
    before = entries(run)
    for error in start(run, Start.from_newest):
        assert isinstance(error, NotCommitted)
        assert all(f"step-0000000{step} skipped" in str(error) for step in (1, 2, 3, 4))
        assert "Nothing was moved" in str(error)
    assert entries(run) == before


@pytest.mark.parametrize(
    "error",
    [StorageError("EIO at the file"), OSError(5, "EIO at the file"), CheckpointError("weights only"), ConfigError("x")],
    ids=lambda error: type(error).__name__,
)
def test_any_other_error_of_one_rank_ends_all_and_moves_nothing(run: LockedRun, error: Exception) -> None:
    damage(run, 4)
    before = entries(run)

    def fail(rank: int, step: int) -> None:
        if rank == 2:
            raise error

    for ended in start(run, Start.from_newest, fail):
        assert isinstance(ended, TkError)
        assert str(error) in str(ended)
        assert not isinstance(ended, NotCommitted)
    assert entries(run) == before


def test_a_copied_step_stops_the_start(run: LockedRun) -> None:
    shutil.copytree(run.path / "step-00000002", run.path / "step-00000009")
    before = entries(run)
    for error in start(run, Start.from_newest):
        assert isinstance(error, CheckpointError)
        assert "step-00000009 is named as step 9 and holds step 2" in str(error)
    assert entries(run) == before


def test_a_given_checkpoint_that_cannot_be_loaded_forks_nothing(run: LockedRun) -> None:
    damage(run, 2)
    (run.path / "step-00000004" / "COMMIT").unlink()
    before = entries(run)
    given = run.path / "step-00000002"
    for error in start(run, lambda it: it.from_given(given, fork=True)):
        assert isinstance(error, CheckpointError)
        assert "block 0 of model.embed_tokens.weight" in str(error)
    for error in start(run, lambda it: it.from_given(run.path / "step-00000001", fork=False)):
        assert "holds step 3, newer than step 1" in str(error)
    assert entries(run) == before
    assert start(run, lambda it: it.from_given(run.path / "step-00000001", fork=True)) == [1] * RANKS
    assert sorted(path.name for path in run.path.glob("forked-*/*")) == ["step-00000002", "step-00000003"]
    assert len(list(run.path.glob("step-00000004.bad-*"))) == 1


def test_all_ranks_open_the_step_that_rank_0_finds(run: LockedRun) -> None:
    """Another job commits a step between two ranks' looks at its folder."""

    def find(rank: int) -> Checkpoint:
        return Checkpoint.open(run.path / f"step-0000000{3 + (rank > 0)}")

    found = together(RANKS, lambda peers: open_together(lambda: find(peers.rank), peers).path.name)
    assert found == ["step-00000003"] * RANKS


def test_never_takes_an_empty_folder_only(run: LockedRun, tmp_path: Path) -> None:
    for error in start(run, Start.anew):
        assert isinstance(error, ConfigError)
        assert "holds step 4 of an earlier run, which `--resume never` would not continue" in str(error)
    with RunFolder(tmp_path / "other").lock() as empty:
        assert start(empty, Start.anew) == [None] * RANKS
        assert start(empty, Start.from_newest) == [None] * RANKS
