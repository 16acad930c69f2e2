"""Locks of files and folders, as two jobs on one host meet them."""

import logging
import os
from pathlib import Path

import pytest

from tk.checkpoint.files import locks, storage
from tk.core.errors import StorageError


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "LOCK"


def test_one_of_two_gets_a_file_until_it_closes_it(lock: Path) -> None:
    first, second = locks.open_lock(lock), locks.open_lock(lock)
    assert locks.try_lock(first) is True
    assert locks.try_lock(second) is False
    storage.close(first)
    assert locks.try_lock(second) is True
    storage.close(second)


@pytest.mark.parametrize("target", ["theirs", "nowhere", "LOCK"])
def test_a_link_is_no_lock(lock: Path, target: str) -> None:
    """As DVC makes of every file. Behind it may be any file of the user's, which a note would overwrite."""
    (lock.parent / "theirs").write_text("years of work")
    lock.symlink_to(target)
    with pytest.raises(StorageError, match="LOCK is a link, and a lock is a file of its own: remove the link"):
        locks.open_lock(lock)
    assert sorted(path.name for path in lock.parent.iterdir()) == ["LOCK", "theirs"]
    assert (lock.parent / "theirs").read_text() == "years of work"


def test_a_note_is_written_and_taken_back(lock: Path) -> None:
    fd = locks.open_lock(lock)
    locks.write_note(fd, b"one job's note")
    locks.write_note(fd, b"two")
    assert lock.read_bytes() == b"two job's note", "a reader never finds the file empty in between"
    storage.close(fd)


def test_a_beat_is_seen(lock: Path) -> None:
    fd = locks.open_lock(lock)
    os.utime(fd, (1.0, 1.0))
    before = locks.last_change(lock)
    locks.touch(fd)
    assert locks.last_change(lock) > before == 10**9
    storage.close(fd)


def test_a_folder_is_had_by_one(tmp_path: Path) -> None:
    held = locks.lock_folder(tmp_path)
    assert held is not None
    assert locks.lock_folder(tmp_path) is None
    storage.close(held)
    again = locks.lock_folder(tmp_path)
    assert again is not None
    storage.close(again)


def test_a_folder_that_another_program_keeps_is_waited_for_then_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "_MAX_WAIT", 0.03)
    monkeypatch.setattr(locks, "_LOG_AFTER", 0.0)
    held = locks.lock_folder(tmp_path)
    assert held is not None
    entered = False
    with caplog.at_level(logging.WARNING), locks.locked_folder(tmp_path):
        entered = True
    storage.close(held)
    assert entered
    assert f"Waiting for the lock of {tmp_path}, which another program holds" in caplog.text
    assert f"{tmp_path} is still locked by another program" in caplog.text
