"""The log on a thread of its own, so that standard error, a pipe that is not read, stops that thread alone."""

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from .console_log import console_handlers, show_log
from .repeats import Repeats

MOST_WAITING: Final = 8 << 20  # characters of lines that are not written yet; later lines are dropped and counted
PATIENCE: Final = 0.5  # seconds in which the file must take something, for the rest to be written at the end
_PIECE: Final = 4096  # bytes that a pipe takes at once, without those of other processes between them
_DROPPED: Final = "%d lines of the log are missing here: standard error was not read."
_HELD: Final = "This error came %d more times since it was last shown."
_ROOT: Final = __package__.split(".")[0]  # the logger above those of all modules


class BackgroundLines(logging.Handler):
    """Writes each record as a line to a file that may block; the threads that log never wait for it.

    An error that repeats is written once a minute, with the number of those before it that were not.

    Args:
        descriptor: the file, which stays open.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: list[str] = []
        self._waiting = self._dropped = 0
        self._progress = time.monotonic()
        self._is_over = False
        self._repeats = Repeats[logging.LogRecord]()
        self._thread = threading.Thread(target=self._run, name="tk-log", daemon=True)
        self._thread.start()

    def createLock(self) -> None:
        """Makes the only lock, that of `handle` and of everything here, which a thread may take again.

        A finalizer that logs may interrupt a thread that holds it. With two locks it would wait for a thread that logs,
        has one, and waits for the other.
        """
        super().createLock()
        assert self.lock is not None
        self._changed = threading.Condition(self.lock)

    def emit(self, record: logging.LogRecord) -> None:
        held = self._repeats.see(_kind_of(record), record) if record.levelno >= logging.ERROR else 0
        if held is not None:
            self._add(record, held)

    def _add(self, record: logging.LogRecord, held: int = 0) -> None:
        line = self.format(record) + "\n" + (self._line(_HELD, held) if held else "")
        with self._changed:
            if self._waiting > MOST_WAITING:
                self._dropped += 1
                return
            self._lines.append(line)
            self._waiting += len(line)
            self._changed.notify_all()

    def finish(self) -> bool:
        """Returns when all lines are written (True), or when the file has taken nothing for a while."""
        with self._changed:
            for record, held in self._repeats.due(at_end=True):
                self._add(record, held)
            self._is_over = True
            self._progress = time.monotonic()
            self._changed.notify_all()
            while self._thread.is_alive() and (left := self._progress + PATIENCE - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._waiting

    def _run(self) -> None:
        while (lines := self._next()) is not None:
            with suppress(OSError):  # a full disk, or no reader any more: later lines are tried again
                self._write("".join(lines).encode(errors="backslashreplace"))
            with self._changed:
                self._waiting = sum(map(len, self._lines))
        with self._changed:
            self._progress = 0.0
            self._changed.notify_all()

    def _next(self) -> list[str] | None:
        """Waits for lines and returns them; None: there are none, and no more come."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_over)
            lines, self._lines = self._lines, []
            if self._dropped:
                lines.append(self._line(_DROPPED, self._dropped))
                self._dropped = 0
            return lines or None

    def _line(self, text: str, count: int) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None)) + "\n"

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while at < len(data):
            poll.poll()  # the file may be one that does not block
            end = data.rfind(b"\n", at, at + _PIECE) + 1 or at + _PIECE
            at += os.write(self._descriptor, view[at:end])
            with self._changed:
                self._progress = time.monotonic()


def _kind_of(record: logging.LogRecord) -> Hashable:
    """Returns what errors have in common that are the same one: their place and exception, or all of their text."""
    if record.exc_info is None:
        return record.name, record.lineno, record.getMessage()
    return record.name, record.lineno, record.exc_info[0]


@contextmanager
def background_log(as_json: bool = False, is_private: bool = False) -> Iterator[None]:
    """A context in which the log of `show_log`, and warnings of other libraries, are written by a thread of their own.

    At its end all lines are written. If nothing reads them, what the process prints there afterwards goes nowhere, so
    that it can end. A standard error that is no file stays as it is.

    Args:
        as_json: whether a message is a line of JSON, now and afterwards.
        is_private: whether nothing in the log may quote a caller, now and afterwards; see `private_log`.
    """
    show_log(as_json, is_private=is_private)
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
