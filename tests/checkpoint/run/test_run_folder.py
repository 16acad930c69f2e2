"""Saving and committing: what counts, what is skipped and why, who may write, what is cleared and pruned."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, write_part
from tk.core.errors import CheckpointError, ManifestError, NotCommitted, ShardMissing
from tk.core.geometry import Box
from tk.core.layout import Layout, Owned, owned
from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.faults import watched
from tk.tests.checkpoint.saving import MIXED, STATES, assert_equal, cut, llama_table, save_step, true_values

SMALL = llama_table(layers=1)
LAYOUT = Layout(tp=2)


def write_all(folder: Path, ranks: list[int]) -> None:
    specs = {spec.name: spec for spec in SMALL}
    for rank in ranks:
        items = owned(SMALL, LAYOUT, rank, list(STATES))
        entries = [(i, "F32", cut(true_values(specs[i.tensor], i.slot, "F32"), i)) for i in items]
        write_part(folder, rank, SMALL, entries)


def test_what_was_saved_is_there(tmp_path: Path) -> None:
    resume = {"step": 7, "optimizer": {"step": 7}, "scheduler": {}, "tokens": 123, "loss_scale": 0.5, "seed": 1}
    groups = [{"params": ["model.norm.weight"], "weight_decay": 0.0}]
    files = {"config.json": b'{"hidden_size": 32}', "tokenizer.json": b"{}"}
    path = save_step(tmp_path, SMALL, LAYOUT, MIXED, step=7, resume=resume, param_groups=groups, side_files=files)
    found = Checkpoint.open(tmp_path)
    assert path == tmp_path / "step-00000007" == found.path
    assert (found.step, found.layout, found.resume, list(found.manifest.param_groups)) == (7, LAYOUT, resume, groups)
    assert found.config() == {"hidden_size": 32}
    assert found.side_files() == files
    assert found.manifest_sha256 == (path / "COMMIT").read_text().strip()
    assert (tmp_path / "LATEST").read_text() == "step-00000007\n"
    assert found.tensors["model.norm.weight"].slots == MIXED


def test_the_newest_good_step_is_taken_and_the_others_explained(tmp_path: Path) -> None:
    steps = {step: save_step(tmp_path, SMALL, LAYOUT, STATES, step=step) for step in (1, 2, 3, 4, 5)}
    (steps[5] / "COMMIT").unlink()
    (steps[4] / "manifest.json").write_bytes(b"{}")
    shard = steps[3] / "model-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    (tmp_path / "step-00000009.tmp-abc").mkdir()
    found = Checkpoint.open(tmp_path)
    assert found.step == 2
    reasons = [
        "step-00000005 skipped: .*never finished",
        "step-00000004 .*does not match",
        "step-00000003 .*were written",
    ]
    assert len(found.skipped) == 3
    for reason, message in zip(found.skipped, reasons, strict=True):
        assert re.search(message, reason)
    for step in (1, 2):
        shutil.rmtree(steps[step])
    with pytest.raises(NotCommitted, match=r"no usable step.*00000005.*00000004.*00000003"):
        Checkpoint.open(tmp_path)


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        refusal = rf"in use by another job.*{os.getpid()}.*{run.attempt}"
        with pytest.raises(CheckpointError, match=refusal), RunFolder(tmp_path).lock():
            pass
        holder = json.loads((tmp_path / "LOCK").read_text())
        assert holder["attempt"] == run.attempt
    with RunFolder(tmp_path).lock() as again:
        assert again.attempt != run.attempt


def test_the_lock_and_leftovers_of_a_killed_job_are_cleared(tmp_path: Path) -> None:
    save_step(tmp_path, SMALL, LAYOUT, STATES, step=1)
    code = (
        "import sys, time; from pathlib import Path; from tk.checkpoint import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock() as run:\n"
        "    (run.begin_step(2) / 'half').write_text('x'); print('ready', flush=True); time.sleep(60)"
    )
    job = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointError, match=str(job.pid)), RunFolder(tmp_path).lock():
            pass
        assert list(tmp_path.glob("*.tmp-*"))
        assert Checkpoint.open(tmp_path).step == 1
    finally:
        job.send_signal(signal.SIGKILL)
        job.communicate()
    with RunFolder(tmp_path).lock():
        assert not list(tmp_path.glob("*.tmp-*"))
    assert Checkpoint.open(tmp_path).step == 1


def test_a_good_step_is_never_overwritten_and_a_bad_one_is_set_aside(tmp_path: Path) -> None:
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


def test_pruning_keeps_the_newest_the_milestones_and_what_it_cannot_judge(tmp_path: Path) -> None:
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


def test_pruning_keeps_steps_in_which_somebody_put_something(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"config.json": b"{}"}
    paths = {step: save_step(tmp_path, SMALL, LAYOUT, STATES, step=step, side_files=files) for step in (1, 2, 3, 4)}
    (paths[1] / "notes.txt").write_text("mine")
    (paths[2] / "parts" / "mine").mkdir()
    with RunFolder(tmp_path).lock() as run:
        assert run.prune(keep=1) == [paths[3]]
    assert (paths[1] / "notes.txt").read_text() == "mine"
    assert f"{paths[1]} is not pruned: it holds notes.txt, which no save wrote" in caplog.text
    assert "it holds parts/mine" in caplog.text


def test_missing_parts_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        write_all(folder, [0])
        with pytest.raises(ShardMissing, match=r"1 of 2 writers have not finished: 00001\.json"):
            commit(run, NewStep(1, SMALL, LAYOUT, STATES), timeout=0)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_part_that_lacks_an_element_is_not_committed(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        write_all(folder, [0])
        write_part(folder, 1, SMALL, [])
        with pytest.raises(ManifestError, match="exactly once"):
            commit(run, NewStep(1, SMALL, LAYOUT, STATES))
    assert not (folder / "COMMIT").exists()


@pytest.mark.parametrize(
    ("call", "stride"), [("pwrite", 9), ("fsync", 1), ("rename", 1), ("fsync_dir", 1), ("open_new", 1)]
)
def test_a_failing_disk_leaves_the_previous_step_the_newest(tmp_path: Path, call: str, stride: int) -> None:
    """The n-th use of each call and all after it fail, for every n (or every ninth) that a save makes."""
    save_step(tmp_path / "first", SMALL, LAYOUT, STATES, step=1)
    failures = 0
    run = tmp_path / "run"
    for n in range(0, 1000, stride):
        shutil.copytree(tmp_path / "first", run)
        left = [n]

        def failing(name: str, operation: Callable[..., Any], *args: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return operation(*args)

        with watched(failing, (call,)):
            try:
                save_step(run, SMALL, LAYOUT, STATES, step=2)
                break
            except OSError:
                failures += 1
        found = Checkpoint.open(run)
        assert found.step == 1 or (found.step == 2 and (run / "step-00000002" / "COMMIT").exists())
        assert found.verify().ok
        shutil.rmtree(run)
    assert failures >= 3
    assert Checkpoint.open(run).step == 2


@pytest.mark.parametrize(
    "values",
    [np.zeros(31, np.float32), np.zeros((32, 1), np.float32), np.zeros(32, np.float64), np.zeros(64, np.float32)[::2]],
)
def test_values_that_are_not_what_was_promised(tmp_path: Path, values: np.ndarray) -> None:
    spec = TensorSpec("model.norm.weight", (32,))
    item = Owned(spec.name, "weight", Box.whole(spec.shape))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight, slot weight: got values"):
        write_part(tmp_path, 0, (spec,), [(item, "F32", values)])
    assert not list((tmp_path / "parts").iterdir())


def test_a_writer_begins_a_new_file_when_one_is_full(tmp_path: Path) -> None:
    specs = {spec.name: spec for spec in SMALL}
    with RunFolder(tmp_path).lock() as run:
        folder = run.begin_step(1)
        entries = [
            (item, "F32", lambda item=item: cut(true_values(specs[item.tensor], item.slot, "F32"), item))
            for item in owned(SMALL, Layout(), 0, list(STATES))
        ]
        part = write_part(folder, 0, SMALL, entries, max_file=10_000)
        commit(run, NewStep(1, SMALL, Layout(), STATES))
    assert sum(name.startswith("model-00000") for name in part.files) > 2
    found = Checkpoint.open(tmp_path)
    assert found.verify().ok
    for spec in SMALL[:-1]:
        assert_equal(found.read(spec.name).numpy(), true_values(spec, "weight", "F32"))
