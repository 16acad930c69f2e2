"""The main loop of a rank of the parity pool: it reads a job per line from stdin and writes lines of JSON."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import TkError, pack
from ..core.process import die_with_parent, lasting_imports

Send = Callable[[Mapping[str, Any]], None]
Work = Callable[[Mapping[str, Any], Send], Mapping[str, Any]]


def serve(load: Callable[[], Work]) -> None:
    """Answers every line of stdin with {"result": ...} or a packed {"error": ...}, after the messages of the work.

    Args:
        load: does the slow imports and returns the work: a function of a job and of a function that sends a message.
    """
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout of libraries must not mix with the answers

    def send(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    with lasting_imports():
        work = load()
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"result": work(json.loads(line), send)}
        except Exception as error:  # the process's boundary: the pool must be able to report any error
            answer = {"error": pack(error if isinstance(error, TkError) else _fault(error))}
        send(answer)


def _fault(error: Exception) -> TkError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TkError(f"{type(error).__name__}: {error} (in {place.filename}:{place.lineno})")
