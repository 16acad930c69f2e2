"""The log of a process that holds what callers have sent: nothing in it quotes them.

An exception's message may hold their words, and so may a line of another library. So exceptions are shown by class and
place alone, on all ways on which Python prints one, and lines of other libraries by their place.
"""

import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Final, TextIO

# Libraries whose lines have nothing of a request: the exporter of spans says there what is wrong with the collector.
_TRUSTED: Final = ("opentelemetry",)
_ROOT: Final = __package__.split(".")[0]  # the logger above those of all modules
_LOG: Final = logging.getLogger(__name__)


def shown_message(record: logging.LogRecord) -> str:
    """Returns the message of a record; of another library's, its place and the class of its exception."""
    if record.name.split(".")[0] in (_ROOT, *_TRUSTED):
        return record.getMessage()
    kind = f", {record.exc_info[0].__name__}" if record.exc_info and record.exc_info[0] else ""
    return (
        f"{record.name}: {record.levelname.lower()} in {record.funcName} ({record.filename}:{record.lineno}){kind}; "
        "its text may quote a request, and is shown with --log-prompts only"
    )


def shown_traceback(error: BaseException | None) -> str:
    """Returns the traceback of an exception and of those that led to it, without their messages."""
    return "\n".join(_lines_of(error, set()))


def _lines_of(error: BaseException | None, seen: set[int]) -> Iterator[str]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    yield from _lines_of(before, seen)
    yield "Traceback (most recent call last):"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _lines_of(each, seen)


def keep_private() -> None:
    """Makes this process show exceptions that end a thread, or that nothing can catch, and warnings, by our log.

    gRPC, if it is not loaded yet, prints nothing itself: its lines have names that clients ask for in handshakes, one
    line for each. GRPC_VERBOSITY brings them back.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.excepthook = _on_end
    threading.excepthook = lambda args: _report("A thread ended", args.exc_value)
    sys.unraisablehook = lambda args: _report("An exception was ignored", args.exc_value)
    warnings.showwarning = _on_warning


def _on_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _report("The process ended", error)


def _report(what: str, error: BaseException | None) -> None:
    if not isinstance(error, SystemExit):
        _LOG.error("%s.", what, exc_info=error)


def _on_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _LOG.warning("%s at %s:%d", category.__name__, filename, lineno)
