"""The end of a command by a signal, with the same clean-up as after Ctrl-C."""

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
def exit_on_signals() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise SystemExit(1), so that clean-up runs as after Ctrl-C.

    After the first signal, others are ignored, so that they do not disturb the clean-up. A signal that is ignored, as
    under nohup, or that has a handler already, is left alone.
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
