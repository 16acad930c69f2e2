"""Shows the log of tk's libraries on standard error, as plain lines or as JSON."""

import datetime
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TextIO

from .private_log import keep_private, shown_message, shown_traceback

_LOG: Final = logging.getLogger(__name__)
_ROOT: Final = __package__.split(".")[0]  # the logger above those of all modules


class _StandardError(logging.Handler):
    """Prints each record to the standard error of the moment, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)


class _Lines(logging.Formatter):
    """Writes a record as a plain line, which begins with "error: " or "warning: " if it is one.

    Args:
        form: see `show_log`.
        fields: fields of every line of JSON.
    """

    def __init__(self, form: str, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self.form, self.fields = form, fields
        self.is_private, self.has_names = "private" in form.split(), "verbose" in form.split()

    def format(self, record: logging.LogRecord) -> str:
        message = f"{_prefix(record.levelno)}{self.message_of(record)}"
        if self.has_names:
            time = datetime.datetime.fromtimestamp(record.created).astimezone()
            message = f"{time:%H:%M:%S}.{time.microsecond // 1000:03d} {record.name}: {message}"
        return f"{message}\n{self.formatException(record.exc_info)}" if record.exc_info else message

    def message_of(self, record: logging.LogRecord) -> str:
        return shown_message(record) if self.is_private else record.getMessage()

    def formatException(self, ei: Any) -> str:
        return shown_traceback(ei[1]) if self.is_private else super().formatException(ei)


class _JsonLines(_Lines):
    """Writes a record as one line of JSON, with its attribute `fields`, a mapping, if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self.fields,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": self.message_of(record)} if fields is None else fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _prefix(level: int) -> str:
    return "error: " if level >= logging.ERROR else "warning: " if level >= logging.WARNING else ""


def show_log(form: str = "text", fields: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Shows messages on standard error. Commands and ranks call it; a second call only changes the form.

    A program that imports tk does not call it and sees warnings only, unless it configures `logging` itself.

    Args:
        form: "text", or "json" for a line of JSON per message; before it "quiet" for warnings and errors alone, or
            "verbose" for details too, in text with time and logger; and "private" if nothing that this process shows
            may quote a caller (see `private_log`).
        fields: fields of every line of JSON.
    """
    words = form.split()
    formatter = (_JsonLines if "json" in words else _Lines)(form, fields)
    if formatter.is_private:
        keep_private()
    else:
        warnings.showwarning = _on_warning
    if logging.lastResort is not None:  # what prints other libraries' lines, unless a handler does
        logging.lastResort.setFormatter(formatter)
    level = logging.WARNING if "quiet" in words else logging.DEBUG if "verbose" in words else logging.INFO
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level)
    handlers = console_handlers()
    if not handlers:
        handlers = [_StandardError()]
        logger.addHandler(handlers[0])
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.setLevel(level)  # a logger below may let more through, for another handler


def _on_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows a warning of Python's as one of the log."""
    _LOG.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def console_handlers() -> list[logging.Handler]:
    """Returns the handler that `show_log` has added, if it was called."""
    return [handler for handler in logging.getLogger(_ROOT).handlers if isinstance(handler, _StandardError)]


def shown_form() -> str:
    """Returns how this process shows messages, for `show_log` in another; "" if as a program that only imports tk."""
    own, root = logging.getLogger(_ROOT), logging.getLogger()
    handlers = [*own.handlers, *root.handlers]
    forms = (each.formatter.form for each in handlers if isinstance(each.formatter, _Lines))
    is_shown = bool(handlers) and own.isEnabledFor(logging.INFO)
    return next(forms, "text" if is_shown else "")


def quieter(form: str) -> str:
    """Returns a form without what is neither warning nor error: of what every process does alike, one shows all."""
    return " ".join(["quiet", *(word for word in form.split() if word not in ("quiet", "verbose"))])
