"""The log on a thread of its own: a standard error that nothing reads stops no other thread, else nothing is lost."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tk.core import background_log
from tk.core.background_log import MOST_WAITING, BackgroundLines
from tk.tests.clock import Clock

LOGGING = """
import logging, sys, time
from tk.core import background_log as module
from tk.core.background_log import background_log
if "hurried" in sys.argv:
    module.PATIENCE = 0.2
with background_log("json" if "json" in sys.argv else "text"):
    log = logging.getLogger("tk.infer.serve")
    for number in range(int(sys.argv[1])):
        log.info("line %d", number, extra={"fields": {"number": number}})
    logging.getLogger("asyncio").error("a fault")
    logging.getLogger("asyncio").info("a detail")
    logging.getLogger("others").warning("theirs")
if "then" in sys.argv:
    log.info("the end")
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, BackgroundLines]]:
    """A pipe, and what writes lines to it."""
    reader, writer = os.pipe()
    handler = BackgroundLines(writer)
    yield reader, handler
    os.close(reader)  # ends a thread that writes
    handler.finish()
    os.close(writer)


def lock_of(handler: BackgroundLines) -> threading.RLock:
    assert handler.lock is not None
    return handler.lock


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("tk", logging.INFO, __file__, 1, text, None, None)


def failure(number: int) -> logging.LogRecord:
    try:
        raise KeyError(number)
    except KeyError:
        return logging.LogRecord("tk", logging.ERROR, __file__, 1, "a fault", None, sys.exc_info())


def test_an_error_that_repeats_is_written_once_with_the_number_of_the_others(
    pipe: tuple[int, BackgroundLines],
) -> None:
    reader, handler = pipe
    for number in range(5):
        handler.emit(failure(number))
    handler.emit(logging.LogRecord("tk", logging.ERROR, __file__, 1, "another %s", ("fault",), None))
    handler.emit(record("the end"))
    read = read_until(reader, b"the end\n")
    assert [line for line in read if "fault" in line] == ["a fault", "another fault"]
    assert "KeyError: 0" in read
    handler.finish()
    read = read_until(reader, b"last shown.\n")
    assert (read[0], read[-1]) == ("a fault", "This error came 3 more times since it was last shown.")
    assert "KeyError: 4" in read


def read_until(reader: int, last: bytes) -> list[str]:
    read = b""
    while not read.endswith(last):
        read += os.read(reader, 1 << 16)
    return read.decode().splitlines()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_process_that_ends_has_written_every_line(form: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOGGING, "5000", form, "then"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    lines = ended.stderr.splitlines()
    if form == "json":
        assert [json.loads(line)["number"] for line in lines if '"number"' in line] == list(range(5000))
        others = [json.loads(line)["message"] for line in lines[:-1] if '"message"' in line]
        assert others == ["a fault", "theirs"], "all lines are JSON"
    else:
        assert [line for line in lines if line.startswith("line")] == [f"line {number}" for number in range(5000)]
        assert lines[5000:-1] == ["error: a fault", "warning: theirs"]
    assert "a detail" not in ended.stderr
    assert "the end" in lines[-1], "afterwards the log is as before"


def test_a_process_whose_log_is_not_read_ends(tmp_path: Path) -> None:
    words = ["20000", "text", "hurried", "then"]  # the last line could be that of an error
    command = [sys.executable, "-c", LOGGING, *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.wait(30) == 0
    assert process.stderr.read().startswith(b"line 0\nline 1\n")
    process.stderr.close()


def test_a_full_pipe_stops_no_thread_that_logs_and_missing_lines_are_counted(
    pipe: tuple[int, BackgroundLines],
) -> None:
    reader, handler = pipe
    text = "x" * 999
    begun = time.thread_time()
    number = MOST_WAITING // 1000 + 500  # some 64 of these fit into the pipe
    for _ in range(number):
        handler.emit(record(text))
    assert time.thread_time() - begun < 1
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(read_until(reader, b"not read.\n")))
    thread.start()
    thread.join(30)
    missing = int(lines[-1].split()[0])
    assert lines[-1] == f"{missing} lines of the log are missing here: standard error was not read."
    assert lines[:-1] == [text] * (number - missing)
    assert 300 < missing < 600
    handler.emit(record("read again"))
    assert os.read(reader, 100) == b"read again\n"


def test_lines_come_again_after_a_write_that_failed(
    pipe: tuple[int, BackgroundLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, handler = pipe
    failed, write = threading.Event(), os.write

    def fail_once(descriptor: int, data: memoryview) -> int:
        if failed.is_set():
            return write(descriptor, data)
        failed.set()
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("tk.core.background_log.os.write", fail_once)
    handler.emit(record("lost"))
    assert failed.wait(30)
    handler.emit(record("kept"))
    assert read_until(reader, b"kept\n") == ["kept"]


def test_a_finalizer_that_logs_while_a_line_is_handed_over_does_not_wait_for_itself(
    pipe: tuple[int, BackgroundLines],
) -> None:
    reader, handler = pipe

    def interrupted() -> None:
        with lock_of(handler):
            handler.emit(record("of a finalizer"))

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert read_until(reader, b"of a finalizer\n") == ["of a finalizer"]


def test_a_finalizer_that_logs_while_another_thread_does_waits_for_no_one_who_waits_for_it(
    pipe: tuple[int, BackgroundLines],
) -> None:
    """asyncio logs a lost task in its finalizer, which may run in the thread that hands lines over."""
    reader, handler = pipe
    others = threading.Thread(target=lambda: handler.handle(record("of another thread")), daemon=True)

    def interrupted() -> None:
        with lock_of(handler):
            others.start()
            others.join(0.2)  # it waits now
            handler.handle(record("of a finalizer"))

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert read_until(reader, b"of another thread\n") == ["of a finalizer", "of another thread"]


def test_errors_that_others_log_at_the_end_do_not_meet_the_count_of_those_held_back(
    pipe: tuple[int, BackgroundLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count is a dictionary that is gone through at the end, and changed by every error."""
    _, handler = pipe
    met: list[bool] = []

    def due(at_end: bool) -> list[tuple[logging.LogRecord, int]]:
        other = threading.Thread(target=lambda: met.append(lock_of(handler).acquire(blocking=False)))
        other.start()
        other.join()
        return []

    monkeypatch.setattr(handler._repeats, "due", due)
    handler.finish()
    assert met == [False]


def test_the_end_waits_for_a_reader_that_reads_and_not_for_one_that_does_not(
    pipe: tuple[int, BackgroundLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_log, "PATIENCE", 0.2)
    reader, handler = pipe
    for number in range(20_000):
        handler.emit(record(f"line {number}"))
    assert not handler.finish()
    assert read_until(reader, b"line 19999\n")[::19_999] == ["line 0", "line 19999"]


def test_the_end_waits_for_a_disk_that_stalls_for_three_seconds(
    pipe: tuple[int, BackgroundLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, handler = pipe
    clock, go_on, write, join = Clock(), threading.Event(), os.write, handler._thread.join

    def stall(descriptor: int, data: memoryview) -> int:
        assert go_on.wait(60)
        return write(descriptor, data)

    def wait(seconds: float) -> None:
        if seconds > 3:
            go_on.set()
            join(60)
        clock.now += seconds

    monkeypatch.setattr(background_log, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("tk.core.background_log.os.write", stall)
    handler.emit(record("last words"))
    with monkeypatch.context() as patch:
        patch.setattr(handler._thread, "join", wait)
        assert handler.finish()
    assert os.read(reader, 100) == b"last words\n"
