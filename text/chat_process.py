"""The process of a `ChatRenderer`. A chat template is a program: its time and memory are limited here.

Each line of stdin is a request, {"messages": [...], "most_characters": N}, and each line of stdout its answer,
{"text": ...} or {"error": ...} as `errors.pack` describes it. SIGPROF ends the process if a request takes too long.
"""

import json
import resource
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..core.errors import TkError, pack
from ..core.process import die_with_parent
from .chat_template import ChatTemplate

MOST_BYTES: Final = 512 << 20  # of address space for the whole process


def main() -> None:
    """Answers requests until stdin ends."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    template = cache(lambda: ChatTemplate.from_folder(folder))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(template, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(template: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": template().prompt(request["messages"], request["most_characters"])}
    except TkError as error:
        return {"error": pack(error)}


if __name__ == "__main__":
    main()
