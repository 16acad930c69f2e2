"""One job at a time writes to a run folder: among hosts whose locks end at the host, without locks, and for copies."""

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, reshard, write_part
from tk.checkpoint.convert.target import CopyTarget
from tk.checkpoint.files import locks
from tk.checkpoint.run import run_lock
from tk.checkpoint.run.locked_run import LockedRun
from tk.checkpoint.run.run_lock import Holder
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.tests.checkpoint.crashing import LAYOUT, TABLE, assert_is_step, job_of, save, values_of

TIMEOUT = 8.0  # seconds, which no test waits


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Heartbeats are fast; the seconds that the lock waited, which a slow disk adds nothing to."""
    seconds: list[float] = []

    def sleep(duration: float) -> None:
        seconds.append(duration)
        time.sleep(duration)

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(seconds)))
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_SECONDS", TIMEOUT)
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.1)
    return seconds


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 3."""
    save(tmp_path / "run", range(1, 4), keep=0)
    return tmp_path / "run"


@contextmanager
def on_host(name: str, try_lock: Callable[[int], bool | None] = lambda fd: True) -> Iterator[None]:
    """This process as if it ran on another host; by default locks end at the host, so that it gets any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_lock, "_boot", lambda: name)
        patch.setattr("socket.gethostname", lambda: name)
        patch.setattr(locks, "try_lock", try_lock)
        yield


def no_locks(fd: int) -> None:
    return None


@pytest.mark.parametrize("try_lock", [lambda fd: True, no_locks], ids=["locks of each host", "no locks"])
def test_a_living_job_of_another_host_keeps_others_out(
    run: Path, try_lock: Callable[[int], bool | None], caplog: pytest.LogCaptureFixture, waited: list[float]
) -> None:
    with ExitStack() as stack:
        with on_host("first", try_lock):
            held = stack.enter_context(RunFolder(run).lock())
        waited.clear()
        refusal = rf"in use by another job: process {os.getpid()} on host first \(attempt {held.attempt}\)"
        with on_host("second", try_lock), pytest.raises(CheckpointError, match=refusal), RunFolder(run).lock():
            pass
        assert sum(waited) < TIMEOUT, "a sign of life is enough"
        assert "was last used by process" in caplog.text
        assert "on host first" in caplog.text
        assert f"Waiting {TIMEOUT:.0f} s for a heartbeat" in caplog.text
        held.begin_step(4)
    assert (run / "LOCK").read_bytes() == b" " * 512, "it said that it ended"
    waited.clear()
    with on_host("second"), RunFolder(run).lock():
        assert not waited, "nothing to wait for"


def test_a_dead_job_of_another_host_is_followed_once_it_was_silent(
    run: Path, monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_SECONDS", 1.0)
    (run / "LOCK").write_bytes(Holder("gone", 1, "0000dead", "other").to_bytes())
    os.utime(run / "LOCK", (2e9, 2e9))  # a clock that runs ahead
    with RunFolder(run).lock() as held:
        assert 0.99 < sum(waited) < 1.1
        assert json.loads((run / "LOCK").read_text())["attempt"] == held.attempt


def test_a_job_that_ends_while_another_waits_makes_room(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "LOCK").write_bytes(Holder("ending", 1, "0000dead", "other").to_bytes())
    os.utime(run / "LOCK", (1e9, 1e9))
    seconds: list[float] = []

    def end_meanwhile(duration: float) -> None:
        seconds.append(duration)
        os.truncate(run / "LOCK", 0)

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(sleep=end_meanwhile, monotonic=lambda: sum(seconds)))
    with RunFolder(run).lock():
        assert len(seconds) == 1


def test_a_job_of_this_host_that_died_is_followed_at_once(run: Path, waited: list[float]) -> None:
    (run / "LOCK").write_bytes(Holder.here("0000dead").to_bytes())
    with RunFolder(run).lock():
        assert not waited


def test_of_two_that_start_at_once_without_locks_one_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_second(seconds: float) -> None:
        """Happens in the time that the first waits after its note."""
        assert seconds == run_lock.SETTLE_SECONDS
        assert Holder.of(run) is not None
        (run / "LOCK").write_bytes(Holder("b", 1, "0000beef", "b").to_bytes())

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(sleep=write_second, monotonic=time.monotonic))
    refusal = "in use by another job: process 1 on host b"
    with on_host("a", no_locks), pytest.raises(CheckpointError, match=refusal), RunFolder(run).lock():
        pass
    assert Holder.of(run) == Holder("b", 1, "0000beef", "b"), "the other's note stays"


def test_a_job_that_lost_its_lock_publishes_and_removes_nothing(run: Path) -> None:
    with RunFolder(run).lock() as late:
        folder = late.begin_step(4)
        for writer in (1, 0):
            job = job_of(run, late.attempt, writer)
            entries = [(item, "F32", values_of(4)(item)) for item in job.items()]
            write_part(folder, writer, TABLE, entries)
        (run / "LOCK").write_bytes(Holder("other", 1, "0000beef", "other").to_bytes())
        names = sorted(os.listdir(run))
        deeds: list[Callable[[], object]] = [
            lambda: commit(late, NewStep(4, TABLE, LAYOUT)),
            lambda: late.begin_step(5),
            lambda: late.prune(1),
            lambda: late.quarantine([1]),
            lambda: late.fork(1),
        ]
        for deed in deeds:
            with pytest.raises(CheckpointError, match=r"has been taken over by another job: process 1 on host other"):
                deed()
        assert sorted(os.listdir(run)) == names
    assert Holder.of(run) == Holder("other", 1, "0000beef", "other")
    for step in (1, 2, 3):
        assert_is_step(run / f"step-0000000{step}", step)


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b'{"host": 1}', b"\xff" * 9000])
def test_a_note_that_is_none_of_ours_holds_nothing(run: Path, note: bytes) -> None:
    (run / "LOCK").write_bytes(note)
    with RunFolder(run).lock() as held:
        assert json.loads((run / "LOCK").read_bytes().strip(b" \xff"))["attempt"] == held.attempt


def test_a_copy_takes_the_lock_of_the_run_that_gets_it(run: Path) -> None:
    source = run / "step-00000003"
    other = reshard(source, run / "step-00000003-tp1", layout=Layout())  # not a step's name, so nothing of the run's
    with RunFolder(run).lock() as job:
        folder = job.begin_step(4)
        (folder / "half").write_text("written")
        with pytest.raises(CheckpointError, match=rf"in use by another job: process {os.getpid()} on host"):
            reshard(other, source, layout=Layout(), force=True)
        assert (folder / "half").exists()
        assert_is_step(source, 3)
    (run / "step-00000002").rename(run.parent / "two")
    with CopyTarget(run / "step-00000002", Checkpoint.open(run.parent / "two"), force=False).new_folder() as folder:
        with pytest.raises(CheckpointError, match="in use by another job"), RunFolder(run).lock():
            pass
        (folder / "half").write_text("written")
    assert (run / "step-00000002" / "half").exists()


def test_a_late_file_does_not_end_a_removal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run / "step-00000009.tmp-0000dead"
    folder.mkdir()
    (folder / "one").write_text("")
    real, late = os.rmdir, iter(range(2))

    def rmdir(path: Path) -> None:
        for number in late:
            (folder / f"late-{number}").write_text("")
            break
        real(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with RunFolder(run).lock():
        assert not folder.exists()


def test_another_program_s_lock_of_the_folder_above_is_reported_and_not_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "_MAX_WAIT", 0.3)
    monkeypatch.setattr(locks, "_LOG_AFTER", 0.1)
    foreign = locks.lock_folder(run.parent)
    assert foreign is not None
    try:
        reshard(run / "step-00000003", run.parent / "copy", layout=Layout())
    finally:
        os.close(foreign)
    assert f"Waiting for the lock of {run.parent}, which another program holds" in caplog.text
    assert "going on without its lock" in caplog.text
    assert_is_step(run.parent / "copy", 3)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported(
    run: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with caplog.at_level(logging.WARNING), RunFolder(run).lock() as held:
        assert isinstance(held, LockedRun)
    assert f"{run / 'LOCK'} lies on a file system without locks" in caplog.text


def test_a_lock_that_fails_names_its_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(OSError, match=rf"{run}/LOCK cannot be locked: Input/output error \(EIO\)"),
        RunFolder(run).lock(),
    ):
        pass
