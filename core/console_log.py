"""Shows the log of tk's libraries on standard error, as plain lines or as JSON."""

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .private_log import keep_private, shown_message, shown_traceback

_ROOT: Final = __package__.split(".")[0]  # the logger above those of all modules


class _StandardError(logging.Handler):
    """Prints each record to the standard error of the moment, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)


class _Lines(logging.Formatter):
    """Writes a record as a plain line.

    Args:
        is_private: whether nothing in it may quote a caller; see `private_log`.
    """

    def __init__(self, is_private: bool) -> None:
        super().__init__()
        self.is_private = is_private

    def format(self, record: logging.LogRecord) -> str:
        message = self.message_of(record)
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
        }
        fields = getattr(record, "fields", None)
        line |= {"message": self.message_of(record)} if fields is None else fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


_FORMS: Final[Mapping[str, tuple[type[_Lines], bool]]] = MappingProxyType(
    {
        "text": (_Lines, False),
        "json": (_JsonLines, False),
        "private text": (_Lines, True),
        "private json": (_JsonLines, True),
    }
)


def show_log(as_json: bool = False, level: int = logging.INFO, is_private: bool = False) -> None:
    """Shows messages from a level on. Commands and ranks call it; a second call only changes level and format.

    A program that imports tk does not call it and sees warnings only, unless it configures `logging` itself.

    Args:
        as_json: whether a message is a line of JSON.
        level: the least level that is shown.
        is_private: whether nothing that this process shows may quote a caller; see `private_log`.
    """
    show_log_as(f"{'private ' if is_private else ''}{'json' if as_json else 'text'}", level)


def show_log_as(form: str, level: int = logging.INFO) -> None:
    """Shows messages in a form of `shown_format`, but for ""; see `show_log`."""
    kind, is_private = _FORMS[form]
    if is_private:
        keep_private()
        if logging.lastResort is not None:  # what prints other libraries' lines, unless a handler does
            logging.lastResort.setFormatter(kind(is_private))
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level)
    handlers = console_handlers()
    if not handlers:
        handlers = [_StandardError()]
        logger.addHandler(handlers[0])
    for handler in handlers:
        handler.setFormatter(kind(is_private))


def console_handlers() -> list[logging.Handler]:
    """Returns the handler that `show_log` has added, if it was called."""
    return [handler for handler in logging.getLogger(_ROOT).handlers if isinstance(handler, _StandardError)]


def shown_format() -> str:
    """Returns how this process shows messages of level INFO, for `show_log_as` in another; "" if warnings only."""
    own, root = logging.getLogger(_ROOT), logging.getLogger()
    handlers = [*own.handlers, *root.handlers]
    if not handlers or not own.isEnabledFor(logging.INFO):
        return ""
    forms = [
        (type(each.formatter), each.formatter.is_private) for each in handlers if isinstance(each.formatter, _Lines)
    ]
    return next((name for name, form in _FORMS.items() if form in forms), "text")
