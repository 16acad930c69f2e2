"""Saving in another process: what arrives, what is said when it fails, and that it ends with its rank."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder
from tk.checkpoint.run.locked_run import LockedRun
from tk.checkpoint.save.background_save import BackgroundSaver
from tk.checkpoint.save.save_job import SaveJob
from tk.core.errors import CheckpointError, TkError, WorkerDied
from tk.core.layout import Layout
from tk.core.tensors import with_slots
from tk.tests.checkpoint.crashing import TABLE, assert_is_step, save, values_of
from tk.tests.child_processes import has_ended
from tk.tests.open_files import open_files

ALONE = Layout()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LockedRun]:
    """A run folder, locked."""
    with RunFolder(tmp_path / "run").lock() as locked:
        yield locked


@pytest.fixture
def saver(run: LockedRun) -> Iterator[BackgroundSaver]:
    """The writer of a run of one rank."""
    writer = BackgroundSaver(SaveJob(run.path, run.attempt, 0, TABLE, ALONE, keep=2), run.lock_fd)
    yield writer
    writer.close()


def fill(writer: BackgroundSaver, step: int) -> None:
    for item in writer.job.items():
        writer.buffer(item)[:] = values_of(step)(item)


def test_steps_arrive_and_are_pruned(run: LockedRun, saver: BackgroundSaver) -> None:
    for step in (1, 2, 3):
        saver.wait()
        fill(saver, step)
        saver.begin(step, {"step": step})
    saver.wait()
    saver.wait()  # nothing is in flight
    assert [step for step, _ in run.steps()] == [2, 3]
    for step, path in run.steps():
        assert_is_step(path, step)
        assert Checkpoint.open(path).resume == {"step": step}


def test_a_process_with_thousands_of_open_files_saves_too(run: LockedRun) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    writer = BackgroundSaver(SaveJob(run.path, run.attempt, 0, TABLE, ALONE, keep=2), run.lock_fd)
    try:
        fill(writer, 1)
        writer.begin(1, {})
        writer.wait(timeout=60)
    finally:
        writer.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [step for step, _ in run.steps()] == [1]


def test_only_one_save_is_in_flight(saver: BackgroundSaver) -> None:
    fill(saver, 1)
    saver.begin(1, {})
    with pytest.raises(RuntimeError, match="still being saved"):
        saver.begin(2, {})
    saver.wait()


def test_errors_come_with_the_next_wait_and_later_saves_go_on(run: LockedRun, saver: BackgroundSaver) -> None:
    fill(saver, 1)
    saver.begin(1, {})
    saver.wait()
    saver.begin(1, {})
    with pytest.raises(CheckpointError, match="is a good checkpoint and is not overwritten"):
        saver.wait()
    blocker = run.path / f"step-00000002.tmp-{run.attempt}"  # root may write anywhere, but not into a file
    blocker.write_text("")
    saver.begin(2, {})
    with pytest.raises(TkError, match=r"Step 2 was not saved: .*tmp-.*Steps committed before are whole"):
        saver.wait()
    assert not blocker.exists(), "what a failed save leaves is removed"
    fill(saver, 3)
    saver.begin(3, {})
    saver.wait()
    assert_is_step(run.steps()[-1][1], 3)


def test_a_committed_step_is_told_once_and_an_error_left_to_wait(run: LockedRun, saver: BackgroundSaver) -> None:
    assert saver.news() is None
    fill(saver, 1)
    saver.begin(1, {})
    saved = saver.wait()
    assert saved is not None
    path = run.path / "step-00000001"
    assert (saved.step, saved.path) == (1, str(path))
    assert saved.num_bytes == sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    assert 0 < saved.seconds < 60
    assert saver.wait() is None
    saver.begin(2, {})
    found = None
    while found is None:
        found = saver.news()
    assert found.step == 2
    assert saver.news() is None
    assert saver.wait() is None
    saver.begin(2, {})
    while not saver._answer:
        assert saver.news() is None
    with pytest.raises(CheckpointError, match="is not overwritten"):
        saver.wait()
    assert saver.wait() is None


def test_a_killed_writer_is_reported(run: LockedRun, saver: BackgroundSaver) -> None:
    os.kill(saver.process_id, signal.SIGSTOP)
    saver.begin(1, {})
    os.kill(saver.process_id, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"Step 1 was not saved: .*killed by signal 9"):
        saver.wait()
    with pytest.raises(WorkerDied, match="killed by signal 9"):
        saver.begin(2, {})


def test_terminal_signals_do_not_disturb_it(run: LockedRun, saver: BackgroundSaver) -> None:
    fill(saver, 1)
    saver.begin(1, {})
    saver.wait()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(saver.process_id, number)
    fill(saver, 2)
    saver.begin(2, {})
    saver.wait()
    assert_is_step(run.steps()[-1][1], 2)


def test_it_loads_no_torch_and_holds_the_lock_with_its_rank(tmp_path: Path) -> None:
    """The writer of a killed rank is gone before another job gets the lock."""
    code = (
        "import os, sys, time; from pathlib import Path; from tk.checkpoint import RunFolder\n"
        "from tk.checkpoint.save.background_save import BackgroundSaver\n"
        "from tk.tests.checkpoint.crashing import job_of\n"
        "with RunFolder(Path(sys.argv[1])).lock() as run:\n"
        "    writer = BackgroundSaver(job_of(run.path, run.attempt, 0), run.lock_fd)\n"
        "    writer.begin(1, {}); print(writer.process_id, flush=True); time.sleep(60)\n"  # rank 1 never writes
    )
    rank = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    writer = int(rank.stdout.readline())
    try:
        assert tmp_path / "LOCK" in open_files(writer)
        assert "libtorch" not in Path(f"/proc/{writer}/maps").read_text()
        assert os.getsid(writer) != os.getsid(rank.pid)
    finally:
        rank.kill()
        rank.communicate()
    save(tmp_path, range(1, 2))
    assert has_ended(writer), "it outlived its rank"
    assert_is_step(Checkpoint.open(tmp_path).path, 1)


def test_a_slot_of_which_a_rank_owns_nothing_is_saved_too(tmp_path: Path) -> None:
    """With more replicas than tensors some ranks write an empty part."""
    weights, layout = with_slots(TABLE, {"weight": "F32"}), Layout(dp=8)
    with RunFolder(tmp_path).lock() as run:
        jobs = [SaveJob(run.path, run.attempt, rank, weights, layout) for rank in range(8)]
        empty = next(job for job in jobs[1:] if not job.items())
        writer = BackgroundSaver(empty)
        try:
            writer.begin(1, {})
            writer.wait()
        finally:
            writer.close()
        for job in reversed(jobs):
            if job is not empty:
                job.save(1, {}, values_of(1))
    assert_is_step(Checkpoint.open(tmp_path).path, 1)
