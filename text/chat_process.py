"""The process of a `ChatRenderer`. A chat template is a program: its time and memory are limited here.

The first line of stdin is the template, the fields of `TemplateSources` as JSON, which is answered by an empty line.
Each other line is a request, {"messages": [...], "most_characters": N, "form": {...}} with the fields of `PromptForm`,
and each line of stdout its answer, {"text": ...} or {"error": ...} as `errors.pack` describes it. SIGPROF ends the
process if a request takes too long. It opens no file of the model: what it renders is what the server has held since
its start.
"""

import json
import resource
import signal
import sys
from functools import cache
from typing import Any, Final

from ..core.console_log import show_log
from ..core.errors import TkError, pack
from ..core.process import die_with_parent
from .chat_context import PromptForm
from .chat_template import ChatTemplate
from .template_files import TemplateSources

MOST_BYTES: Final = 512 << 20  # of address space for the whole process


def main() -> None:
    """Answers requests until stdin ends."""
    die_with_parent()
    show_log(f"private {sys.argv[2]}")  # an exception may hold words of a conversation
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    seconds, sources = float(sys.argv[1]), TemplateSources(**json.loads(sys.stdin.buffer.readline()))
    template = cache(lambda: ChatTemplate(sources))  # its compilation, too, is a part of a request
    _write(b"")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(template, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(json.dumps(answer).encode())


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _answer(template: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        form = PromptForm(**request["form"])
        return {"text": template().prompt(request["messages"], request["most_characters"], form)}
    except TkError as error:
        return {"error": pack(error)}


if __name__ == "__main__":
    main()
