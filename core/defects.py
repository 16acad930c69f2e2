"""Unexpected exceptions, which are defects of tk: a log line with the traceback, where they happen, and an error."""

import logging
import os

from .errors import TkError

_LOG = logging.getLogger(__name__)


def known_or_defect(error: BaseException, where: str, kind: type[TkError] = TkError) -> TkError:
    """Returns an error of tk as it is; logs any other one with its traceback, and returns one that names its class.

    That error goes to callers of a server, and the text of the exception may hold what another one has sent.

    Args:
        error: the exception, while it is handled or later.
        where: the part of tk that it ended, as the subject of a sentence.
        kind: the class of the error that stands for a defect.
    """
    if isinstance(error, TkError):
        return error
    _LOG.error("%s failed, by a defect of tk.", where, exc_info=error)
    name = type(error).__name__
    found = kind(f"{where} (process {os.getpid()}) failed by a defect of tk ({name}). The log has its traceback.")
    found.__cause__ = error
    return found
