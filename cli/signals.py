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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. A plain KeyboardInterrupt within `exec`, which dataclasses use while a module is imported, makes Python
    end the process by the signal after all clean-up, and not with the command's exit code.
    """


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise SystemExit(1), and Ctrl-C Interrupted, so that clean-up runs.

    After the first SIGTERM or SIGHUP, others are ignored, so that they do not disturb the clean-up. A signal that is
    ignored, as under nohup, or that has a handler already, is left alone.
    """
    ours, interruptible = [], False
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
        interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for number in ours:
        signal.signal(number, _leave)
    if interruptible:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _leave(_number: int, _frame: FrameType | None) -> None:
    for number in _ENDING:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)
