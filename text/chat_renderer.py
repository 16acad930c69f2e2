"""Renders conversations for a server, by a process of its own whose time and memory are limited."""

import json
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..core.errors import ConfigError, TkError, unpack
from ..core.process import start_module

if TYPE_CHECKING:
    from .chat_template import Message

PROCESS: Final = f"{__package__}.chat_process"
MOST_SECONDS: Final = 2.0


class ChatRenderer:
    """Renders conversations by a folder's chat template, one at a time; the first one starts the process.

    The process takes the interpreter's lock of this one for the conversion of messages only. All methods may be called
    from any thread.

    Args:
        folder: the tokenizer's folder.
        most_seconds: the largest CPU time, in seconds, for one conversation.
    """

    def __init__(self, folder: Path, most_seconds: float = MOST_SECONDS) -> None:
        self._arguments = str(folder), str(most_seconds)
        # The kernel ends the process with the thread that started it: this one.
        self._executor = ThreadPoolExecutor(1, "tk-chat")
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, messages: "Sequence[Message]", most_characters: int) -> "Future[str]":
        """Returns the future prompt of a conversation, up to the start of the assistant's next turn.

        Args:
            messages: the messages; JSON can hold their values.
            most_characters: the largest number of characters of the prompt.

        Raises:
            CheckpointError: (the future) the folder has no chat template, or a wrong one.
            ConfigError: (the future) the template refuses the messages, or takes more time, memory or text than it may.
        """
        return self._executor.submit(self._render, messages, most_characters)

    def close(self) -> None:
        """Ends the process; prompts in progress fail."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        self._executor.shutdown()
        self._reap()

    def _render(self, messages: "Sequence[Message]", most_characters: int) -> str:
        request = json.dumps({"messages": messages, "most_characters": most_characters}).encode() + b"\n"
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018 (both are pipes)
        with suppress(BrokenPipeError):  # the process has ended, as its empty answer says too
            process.stdin.write(request)
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise self._death(self._reap())
        answer = json.loads(line)
        if "error" in answer:
            raise unpack(answer["error"])
        text: str = answer["text"]
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        self._process = start_module(PROCESS, self._arguments, stdin=pipe, stdout=pipe)
        return self._process

    def _reap(self) -> int:
        """Takes leave of the process, which has ended or will; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(BrokenPipeError):  # what it has not read
            process.communicate()
        return process.returncode

    @staticmethod
    def _death(exit_code: int) -> TkError:
        if exit_code == -signal.SIGPROF:
            return ConfigError("the chat template takes too long for these messages")
        return TkError(f"the process of the chat template ended with exit code {exit_code}")
