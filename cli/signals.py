"""Ended by a signal: a command cleans up after itself as after Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

EXIT_TERMINATED: Final = 1
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP unwind the command as Ctrl-C does, which cleans up, and end it with exit code 1.

    The first one counts; more of them do not disturb the cleaning. A signal that is ignored, as under nohup, stays so,
    and so does one that somebody else handles.
    """
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _leave(_number: int, _frame: FrameType | None) -> None:
    for number in _ENDING:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)
