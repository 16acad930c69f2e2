"""Shows the log of tk's libraries on standard error, as plain lines or as JSON."""

import datetime
import json
import logging
import sys
from typing import Final

_ROOT: Final = __package__.split(".")[0]  # the logger above those of all modules


class _StandardError(logging.Handler):
    """Prints each record to the standard error of the moment, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)


class _JsonLines(logging.Formatter):
    """Writes a record as one line of JSON, with its attribute `fields`, a mapping, if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def show_log(as_json: bool = False, level: int = logging.INFO) -> None:
    """Shows messages from a level on. Commands and ranks call it; a second call only changes level and format.

    A program that imports tk does not call it and sees warnings only, unless it configures `logging` itself.

    Args:
        as_json: whether a message is a line of JSON.
        level: the least level that is shown.
    """
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level)
    handlers = console_handlers()
    if not handlers:
        handlers = [_StandardError()]
        logger.addHandler(handlers[0])
    for handler in handlers:
        handler.setFormatter(_JsonLines() if as_json else None)


def console_handlers() -> list[logging.Handler]:
    """Returns the handler that `show_log` has added, if it was called."""
    return [handler for handler in logging.getLogger(_ROOT).handlers if isinstance(handler, _StandardError)]


def shown_format() -> str:
    """Returns how this process shows messages of level INFO, "json" or "text"; "" if it shows warnings only."""
    own, root = logging.getLogger(_ROOT), logging.getLogger()
    handlers = [*own.handlers, *root.handlers]
    if not handlers or not own.isEnabledFor(logging.INFO):
        return ""
    return "json" if any(isinstance(handler.formatter, _JsonLines) for handler in handlers) else "text"
