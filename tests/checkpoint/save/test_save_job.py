"""The saves of a rank as plain data: the steps that are written, committed and pruned."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.checkpoint.files import folders
from tk.checkpoint.format.region import Region
from tk.checkpoint.save.save_job import Buffers, SaveJob
from tk.core.errors import StorageError
from tk.core.layout import Layout
from tk.tests.checkpoint.crashing import assert_is_step, job_of, values_of
from tk.tests.checkpoint.saving import MIXED, llama_table


def test_a_job_survives_the_way_to_another_process() -> None:
    job = SaveJob(
        Path("/somewhere/run"),
        "0a1b2c3d",
        3,
        llama_table(),
        Layout(tp=2, dp=4, zero=1),
        MIXED,
        param_groups=[{"name": "adamw", "lr": 1e-3, "params": ["model.norm.weight"]}],
        side_files={"config.json": b"{}", "binary": bytes(range(256))},
        keep=3,
        keep_every=100,
        timeout=12.5,
    )
    assert SaveJob.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_buffers_hold_every_item_side_by_side() -> None:
    job = SaveJob(Path("run"), "0a1b2c3d", 1, llama_table(), Layout(tp=2, dp=2, zero=1), MIXED)
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


def test_a_step_is_saved_even_if_older_ones_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise StorageError(f"Cannot remove {path}: Device or resource busy.", errno.EBUSY)

    with RunFolder(tmp_path).lock() as run:
        for step in (1, 2):
            for writer in (1, 0):
                job = replace(job_of(tmp_path, run.attempt, writer), keep=1)
                if (step, writer) == (2, 0):
                    monkeypatch.setattr(folders, "remove_tree", refuse)
                    with pytest.raises(
                        StorageError, match=r"^Step 2 was saved, but older ones remain: .*busy"
                    ) as caught:
                        job.save(step, {}, values_of(step))
                    assert caught.value.errno == errno.EBUSY
                else:
                    job.save(step, {}, values_of(step))
    assert_is_step(tmp_path / "step-00000002", 2)
