"""The file of states: bytes come back as they were written, past the page cache or through it."""

import errno
import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tk.checkpoint.files import storage
from tk.core.errors import StorageError
from tk.core.state_pieces import PAGE
from tk.tests.open_files import open_files_under
from tk.train.zero.states.buffer import PageBuffer
from tk.train.zero.states.state_file import CHUNK, StateFile

NUM_BYTES = CHUNK + 3 * PAGE


def refuse(*arguments: object) -> int:
    raise StorageError("a larger alignment is needed", errno.EINVAL)


@pytest.fixture(params=["direct", "cached", "direct refused at the first read"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateFile]:
    if request.param == "cached":
        monkeypatch.setattr(storage, "open_direct", lambda fd: None)
    if request.param.startswith("direct refused"):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "pread", refuse)
            made = StateFile(tmp_path, NUM_BYTES)
    else:
        made = StateFile(tmp_path, NUM_BYTES)
    yield made
    made.close()


def ended(pending: "list[Future[None]]") -> None:
    for each in pending:
        each.result()


def test_bytes_come_back_in_both_ways(file: StateFile) -> None:
    written, read = PageBuffer(NUM_BYTES), PageBuffer(NUM_BYTES)
    written.memory[:] = os.urandom(NUM_BYTES)
    ended(file.write_pages(written.memory, 0))
    ended(file.read_pages(read.memory, 0))
    assert read.memory == written.memory
    file.write(memoryview(b"odd"), PAGE + 5)
    ended(file.read_pages(read.memory[:PAGE], PAGE))
    assert bytes(read.memory[5:8]) == b"odd"
    ended(file.write_pages(written.memory[:PAGE], CHUNK))
    some = bytearray(100)
    file.read(memoryview(some), CHUNK + 7)
    assert some == written.memory[7:107]


def test_new_bytes_are_zero_and_the_file_ends_where_it_was_reserved(file: StateFile) -> None:
    buffer = PageBuffer(PAGE)
    file.reserve(NUM_BYTES + PAGE)
    ended(file.read_pages(buffer.memory, NUM_BYTES))
    assert not any(buffer.memory)
    with pytest.raises(StorageError, match="ends at byte"):
        file.read(memoryview(bytearray(2)), NUM_BYTES + PAGE - 1)


def test_closing_it_twice_or_losing_it_gives_the_descriptors_back(tmp_path: Path) -> None:
    file = StateFile(tmp_path, PAGE)
    assert open_files_under(tmp_path) >= 1
    del file
    assert open_files_under(tmp_path) == 0
    again = StateFile(tmp_path, PAGE)
    again.close()
    again.close()
    assert open_files_under(tmp_path) == 0


def test_losing_it_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected also while a thread starts, which holds locks that the end of another thread needs."""
    file, buffer = StateFile(tmp_path, PAGE), PageBuffer(PAGE)
    ended(file.read_pages(buffer.memory, 0))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("tk-states")]
    waited: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda thread, timeout=None: waited.append(thread.name))
        del file
        gc.collect()
    assert waited == []
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "the pool's threads end with it"
