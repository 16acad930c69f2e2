"""The saves of a rank as plain data: the steps that are written, committed and pruned."""

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.checkpoint.files import folders, lookup
from tk.checkpoint.format.region import Region
from tk.checkpoint.run.locked_run import LockedRun
from tk.checkpoint.save import save_job
from tk.checkpoint.save.save_job import Buffers, SaveJob
from tk.core.errors import StorageError
from tk.core.layout import Layout
from tk.core.tensors import with_slots
from tk.tests.checkpoint.crashing import assert_is_step, job_of, save, values_of
from tk.tests.checkpoint.faults import watched
from tk.tests.checkpoint.saving import MIXED, llama_table


def test_a_job_survives_the_way_to_another_process() -> None:
    job = SaveJob(
        Path("/somewhere/run"),
        "0a1b2c3d",
        3,
        with_slots(llama_table(), MIXED),
        Layout(tp=2, dp=4, zero=1),
        param_groups=[{"name": "adamw", "lr": 1e-3, "params": ["model.norm.weight"]}],
        side_files={"config.json": b"{}", "binary": bytes(range(256))},
        keep=3,
        keep_every=100,
        timeout=12.5,
    )
    assert SaveJob.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_buffers_hold_every_item_side_by_side() -> None:
    job = SaveJob(Path("run"), "0a1b2c3d", 1, with_slots(llama_table(), MIXED), Layout(tp=2, dp=2, zero=1))
    buffers = Buffers(job)
    memory = memoryview(bytearray(buffers.nbytes))
    for number, item in enumerate(job.items()):
        buffers.view(memory, item)[:] = number
    for number, (item, dtype) in enumerate(job.stored_as().items()):
        values = buffers.view(memory, item)
        assert values.shape == (Region.of(item.box, item.flat).size,)
        assert values.dtype == dtype.numpy
        assert (values == number).all(), "no other item was written over it"


def test_every_rank_writes_and_the_first_one_commits(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as run:
        jobs = {writer: job_of(tmp_path, run.attempt, writer) for writer in (0, 1)}
        jobs[1].save(1, {"step": 1}, values_of(1))
        assert run.steps() == []
        jobs[0].save(1, {"step": 1}, values_of(1))
    assert_is_step(tmp_path / "step-00000001", 1)
    assert Checkpoint.open(tmp_path).resume == {"step": 1}


NUMBERS = (errno.EBUSY, errno.EACCES, errno.EROFS, errno.ENOTEMPTY, errno.EIO)
CHOSEN = {("rename", errno.EBUSY), ("remove_file", errno.EACCES), ("remove_dir", errno.ENOTEMPTY)}
REFUSALS = [
    pytest.param(call, number, marks=() if (call, number) in CHOSEN else pytest.mark.matrix)
    for call in ("rename", "remove_dir", "remove_file")
    for number in NUMBERS
]


@pytest.mark.parametrize(("call", "number"), REFUSALS)
def test_a_step_is_saved_even_if_older_ones_cannot_be_removed(
    tmp_path: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOTEMPTY is the answer of NFS for a folder in which another process holds a removed file open."""
    real = getattr(folders, call)

    def refuse(path: Path, *others: Path) -> None:
        if "step-00000001" in str(path) and "tmp" not in path.name:
            raise StorageError(f"{path} cannot be removed: {errno.errorcode[number]}.", number)
        real(path, *others)

    def save_both(run: LockedRun, step: int) -> None:
        for writer in (1, 0):
            replace(job_of(tmp_path, run.attempt, writer), keep=1).save(step, {}, values_of(step))

    monkeypatch.setattr(lookup, "PAUSES", (0.0,))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with RunFolder(tmp_path).lock() as run:
        save_both(run, 1)
        with monkeypatch.context() as patch:
            patch.setattr(folders, call, refuse)
            save_both(run, 2)
        assert f"cannot be removed: {errno.errorcode[number]}" in caplog.text
        assert_is_step(tmp_path / "step-00000002", 2)
        save_both(run, 3)
        assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "LATEST", "LOCK"}, "it is tried again"
    assert_is_step(tmp_path / "step-00000003", 3)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_failed_save_leaves_a_full_disk_no_fuller(tmp_path: Path, writer: int) -> None:
    def full(name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        if name == "open_new" and arguments[0].name.startswith("optim"):
            raise StorageError("No space left on device.", errno.ENOSPC)
        return operation(*arguments)

    with RunFolder(tmp_path).lock() as run:
        other = 1 - writer
        if writer == 0:
            job_of(tmp_path, run.attempt, other).save(1, {}, values_of(1))
        with watched(full), pytest.raises(StorageError, match="Step 1 was not saved: No space left"):
            job_of(tmp_path, run.attempt, writer).save(1, {}, values_of(1))
        assert not list(tmp_path.rglob("*.safetensors"))
        assert writer or not run.pending_step(1).exists()


def test_a_rank_whose_folder_rank_0_has_removed_blames_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_part(folder: Path, *_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))

    monkeypatch.setattr(save_job, "write_part", write_part)
    with RunFolder(tmp_path).lock() as run:
        job = job_of(tmp_path, run.attempt, 1)
        with pytest.raises(StorageError, match=r"folder is gone\. Rank 0 removes it when it cannot save"):
            job.save(1, {}, values_of(1))


def test_a_run_goes_on_with_a_smaller_keep_on_a_disk_that_is_full(full_disk: Path) -> None:
    """A tmpfs: two steps fill it, the third fails and leaves nothing; then one step makes room for the next."""
    run = full_disk / "run"
    save(run, range(1, 3), keep=2)
    size = sum(path.stat().st_blocks * 512 for path in (run / "step-00000001").rglob("*"))
    disk = os.statvfs(full_disk)
    filler = full_disk / "filler"
    filler.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - size // 2)))
    with pytest.raises(StorageError, match="Step 3 was not saved"):
        save(run, range(3, 4), keep=2)
    for name in ("step-00000009.tmp-0000dead", "step-00000008.tmp-0000dead"):  # of a job that was killed
        (run / name).mkdir()
        with suppress(OSError):
            (run / name / "data").write_bytes(bytes(os.statvfs(full_disk).f_bavail * disk.f_frsize))
    (run / "LOCK").write_bytes(b"")
    with suppress(OSError), (full_disk / "filler").open("ab", buffering=0) as more:
        while True:
            more.write(bytes(4096))
    save(run, range(3, 5), keep=1)
    assert {path.name for path in run.iterdir()} == {"step-00000004", "LATEST", "LOCK"}
    assert_is_step(run / "step-00000004", 4)
