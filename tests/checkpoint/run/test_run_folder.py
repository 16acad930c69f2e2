"""Saving and committing: what counts, what is skipped and why, who may write, what is cleared and pruned."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.core.errors import CheckpointError, NotCommitted
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import MIXED, STATES, llama_table, save_step

SMALL = llama_table(layers=1)

LAYOUT = Layout(tp=2)


def test_a_saved_step_is_there(tmp_path: Path) -> None:
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
    (tmp_path / "step-00000009.tmp-00000abc").mkdir()
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
