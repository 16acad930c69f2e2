"""Shows the log of tk's libraries on standard error, as plain lines."""

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


def show_log() -> None:
    """Shows messages of level INFO and above. Commands and ranks call it; a second call changes nothing.

    A program that imports tk does not call it and sees warnings only, unless it configures `logging` itself.
    """
    logger = logging.getLogger(_ROOT)
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        logger.addHandler(_StandardError())
