"""The life of a rank of the parity pool: a job per line of stdin, lines of JSON out."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import TkError, pack
from ..core.process import die_with_parent

Say = Callable[[Mapping[str, Any]], None]
Work = Callable[[Mapping[str, Any], Say], Mapping[str, Any]]


def serve(load: Callable[[], Work]) -> None:
    """Answers every line of stdin with {"result": ...} or a packed {"error": ...}, and before that with whatever the
    work says.

    Args:
        load: imports what takes time, and returns what does a job: given the job and a way to say something meanwhile.
    """
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    work = load()
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"result": work(json.loads(line), say)}
        except Exception as error:  # the process's boundary: whatever it is, the pool must be able to say it
            answer = {"error": pack(error if isinstance(error, TkError) else _fault(error))}
        say(answer)


def _fault(error: Exception) -> TkError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TkError(f"{type(error).__name__}: {error} (in {place.filename}:{place.lineno})")
