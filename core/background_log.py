"""The log on a thread of its own, so that standard error, a pipe that is not read, stops that thread alone."""

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Final

from .console_log import console_handlers, show_log
from .repeats import Repeats

MOST_WAITING: Final = 8 << 20  # characters of lines that are not written yet; later lines are dropped and counted
# Seconds in which the file must take something, for the rest to be written at the end: disks and readers of pipes may
# stall for some.
PATIENCE: Final = 5.0
_PIECE: Final = 4096  # bytes that a pipe takes at once, without those of other processes between them
_DROPPED: Final = "%d lines of the log are missing here: standard error was not read."
_HELD: Final = "This error came %d more times since it was last shown."
_ROOT: Final = __package__.split(".")[0]  # the logger above those of all modules


class BackgroundLines(QueueHandler):
    """Writes each record as a line to a file that may block; the threads that log never wait for it.

    An error that repeats is written once a minute, with the number of those before it that were not. The thread that
    writes is no QueueListener: that one stops when it has written everything, so never if the file is not read.

    Args:
        descriptor: the file, which stays open.
    """

    def __init__(self, descriptor: int) -> None:
        self._records: SimpleQueue[logging.LogRecord | None] = SimpleQueue()  # whose `put` a finalizer may interrupt
        super().__init__(self._records)
        self._descriptor = descriptor
        self._queued = self._dropped = 0  # changed by threads that log, with the handler's lock
        self._written = self._reported = 0  # changed by the thread that writes
        self._progress = time.monotonic()
        self._repeats = Repeats[logging.LogRecord]()
        self._thread = threading.Thread(target=self._run, name="tk-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        held = self._repeats.see(_kind_of(record), record) if record.levelno >= logging.ERROR else 0
        if held is not None:
            self._emit(record, held)

    def _emit(self, record: logging.LogRecord, held: int) -> None:
        super().emit(record)
        if held:
            super().emit(_count_of(_HELD, held))

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._queued - self._written > MOST_WAITING:
            self._dropped += 1
            return
        self._queued += len(record.msg)
        super().enqueue(record)

    def finish(self) -> bool:
        """Returns when all lines are written (True), or when the file has taken nothing for a while."""
        self.acquire()
        try:
            for record, held in self._repeats.due(at_end=True):
                self._emit(record, held)
        finally:
            self.release()
        self._records.put(None)
        self._progress = time.monotonic()
        while self._thread.is_alive() and (left := self._progress + PATIENCE - time.monotonic()) > 0:
            self._thread.join(left)
        return self._written == self._queued

    def _run(self) -> None:
        is_over = False
        while not is_over:
            records = [self._records.get()]
            while not self._records.empty():
                records.append(self._records.get())
            is_over = None in records
            lines = [record.msg for record in records if record is not None]
            size = sum(map(len, lines))
            if missing := self._dropped - self._reported:
                lines.append(self.format(_count_of(_DROPPED, missing)))
                self._reported += missing
            with suppress(OSError):  # a full disk, or no reader any more: later lines are tried again
                self._write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
            self._written += size

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while at < len(data):
            poll.poll()  # the file may be one that does not block
            end = data.rfind(b"\n", at, at + _PIECE) + 1 or at + _PIECE
            at += os.write(self._descriptor, view[at:end])
            self._progress = time.monotonic()


def _count_of(text: str, count: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None)


def _kind_of(record: logging.LogRecord) -> Hashable:
    """Returns what errors have in common that are the same one: their place and exception, or all of their text."""
    if record.exc_info is None:
        return record.name, record.lineno, record.getMessage()
    return record.name, record.lineno, record.exc_info[0]


@contextmanager
def background_log(form: str = "text") -> Iterator[None]:
    """A context in which the log of `show_log`, and warnings of other libraries, are written by a thread of their own.

    At its end all lines are written. If nothing reads them, what the process prints there afterwards goes nowhere, so
    that it can end. A standard error that is no file stays as it is.

    Args:
        form: the form of the log, now and afterwards; see `show_log`.
    """
    show_log(form)
    shown = console_handlers()
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's or a test's
        yield
        return
    handler = BackgroundLines(descriptor)
    handler.setFormatter(shown[0].formatter)
    own, root = logging.getLogger(_ROOT), logging.getLogger()
    for each in shown:
        own.removeHandler(each)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for each in shown:
            own.addHandler(each)
        if not handler.finish():
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)
