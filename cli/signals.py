"""The end of a command by a signal, with the same clean-up as after Ctrl-C."""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_TERMINATED: Final = 1
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS: Final = 0.01


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. A plain KeyboardInterrupt within `exec`, which dataclasses use while a module is imported, makes Python
    end the process by the signal after all clean-up, and not with the command's exit code.
    """


class _Terminated(SystemExit):
    """SIGTERM or SIGHUP."""


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise SystemExit(1), and Ctrl-C Interrupted, so that clean-up runs.

    After the first SIGTERM or SIGHUP, others are ignored, so that they do not disturb the clean-up. A signal that is
    ignored, as under nohup, or that has a handler already, is left alone. A signal that comes within a finalizer or a
    callback of a weak reference, of which Python drops the exceptions, takes effect right after it.
    """
    ours, interruptible = [], False
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
        interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for number in ours:
        signal.signal(number, _leave)
    if interruptible:
        signal.signal(signal.SIGINT, _interrupt)
    report_dropped = sys.unraisablehook

    def on_dropped(dropped: "UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, Interrupted | _Terminated):
            _send_again(signal.SIGINT if isinstance(dropped.exc_value, Interrupted) else ours[0])
        else:
            report_dropped(dropped)

    sys.unraisablehook = on_dropped
    try:
        yield
    finally:
        sys.unraisablehook = report_dropped
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
    raise _Terminated(EXIT_TERMINATED)


def _send_again(number: signal.Signals) -> None:
    """Sends a signal to this process in a moment, from a thread that takes none of the locks held here."""
    if number in _ENDING:
        signal.signal(number, _leave)  # the first one had others ignored
    _thread.start_new_thread(_send_later, (number,))


def _send_later(number: signal.Signals) -> None:
    time.sleep(_AGAIN_SECONDS)
    os.kill(os.getpid(), number)
