"""Writing in a run: steps begun, quarantined, forked off and pruned; leftovers cleared."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import STATES, llama_table, save_step

SMALL = llama_table(layers=1)

LAYOUT = Layout(tp=2)


def test_a_good_step_is_never_overwritten_and_a_bad_one_is_quarantined(tmp_path: Path) -> None:
    path = save_step(tmp_path, SMALL, LAYOUT, STATES, step=3)
    with RunFolder(tmp_path).lock() as run:
        with pytest.raises(CheckpointError, match="is a good checkpoint and is not overwritten"):
            run.begin_step(3)
        (path / "COMMIT").write_text("0" * 64)
        folder = run.begin_step(3)
        assert (tmp_path / f"step-00000003.bad-{run.attempt}" / "COMMIT").exists()
        assert folder.name == f"step-00000003.tmp-{run.attempt}"
    save_step(tmp_path, SMALL, LAYOUT, STATES, step=3)
    assert Checkpoint.open(tmp_path).step == 3


def test_pruning_keeps_the_newest_the_milestones_and_bad_steps(tmp_path: Path) -> None:
    paths = {step: save_step(tmp_path, SMALL, LAYOUT, STATES, step=step) for step in (5, 10, 15, 20, 25, 30)}
    (paths[30] / "COMMIT").unlink()
    (paths[5] / "COMMIT").unlink()
    with RunFolder(tmp_path).lock() as run:
        removed = run.prune(keep=2, keep_every=10)
    assert removed == [paths[15]]
    assert [step for step, _ in RunFolder(tmp_path).steps()] == [5, 10, 20, 25, 30]
    with RunFolder(tmp_path).lock() as run:
        run.prune(keep=0)
    assert [step for step, _ in RunFolder(tmp_path).steps()] == [5, 25, 30]
    assert Checkpoint.open(tmp_path).step == 25
    assert not list(tmp_path.glob("*.trash-*"))


def test_pruning_keeps_steps_that_hold_a_users_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"config.json": b"{}"}
    paths = {step: save_step(tmp_path, SMALL, LAYOUT, STATES, step=step, side_files=files) for step in (1, 2, 3, 4)}
    (paths[1] / "notes.txt").write_text("mine")
    (paths[2] / "parts" / "mine").mkdir()
    with RunFolder(tmp_path).lock() as run:
        assert run.prune(keep=1) == [paths[3]]
    assert (paths[1] / "notes.txt").read_text() == "mine"
    assert f"{paths[1]} is not pruned: it holds notes.txt, which no save wrote" in caplog.text
    assert "it holds parts/mine" in caplog.text


def test_half_written_copies_of_a_jobs_own_files_are_cleared_with_those_of_steps(tmp_path: Path) -> None:
    save_step(tmp_path, SMALL, LAYOUT, STATES)
    theirs = [
        "step-00000009.tmp-0000dead",
        "step-00000001.trash-0000dead",
        "LATEST.tmp-0000dead",
        "record.tmp-0000dead",
    ]
    for name in (*theirs, "notes.tmp-0000dead", "record"):
        (tmp_path / name).write_text("")
    with RunFolder(tmp_path).lock():
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000001", "LATEST", "LOCK", "record.tmp-0000dead", "notes.tmp-0000dead", "record"}
    with RunFolder(tmp_path, ["record"]).lock():
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000001", "LATEST", "LOCK", "notes.tmp-0000dead", "record"}


def test_a_start_removes_nothing_of_a_users(tmp_path: Path) -> None:
    save_step(tmp_path, SMALL, LAYOUT, STATES)
    words = ("notes", "20261124", "abcdef", "0a1b2c3d4", "0A1B2C3D", "v2-0a1b2c3d")
    names = {f"{of}.{kind}-{word}" for of in ("step-00000001", "LATEST") for kind in ("tmp", "trash") for word in words}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    with RunFolder(tmp_path).lock() as run:
        run.prune(keep=1)
    assert {path.parent.name for path in tmp_path.glob("*/thesis.txt")} == names


def test_another_process_of_the_job_works_under_the_same_lock(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        other = RunFolder(tmp_path).held_by(run.attempt)
        assert other.begin_step(1) == run.pending_step(1)
    with RunFolder(tmp_path).lock(), pytest.raises(CheckpointError, match="has been taken over by another job"):
        other.begin_step(2)
