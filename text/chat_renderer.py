"""Renders conversations for a server, by processes of their own whose time and memory are limited.

One process is enough as long as conversations are quick, which all but hostile ones are. While a slow one is rendered,
another process answers those behind it. A process that dies or hangs is replaced, and its conversation tried once more.
"""

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..core.defects import known_or_defect
from ..core.errors import ConfigError, TkError, WorkerDied, unpack
from .chat_context import NEW_TURN, PromptForm
from .chat_process_handle import ChatProcess, ChatProcessEnded
from .chat_queue import ChatQueue
from .template_files import TemplateSources

if TYPE_CHECKING:
    from .chat_template import Message

MOST_SECONDS: Final = 2.0  # of CPU time for a conversation
# For a conversation by the clock on the wall, so that a process which is stopped or swapped out hangs for no longer. A
# machine on which 2 s of CPU time take longer is too busy to serve.
MOST_WAIT: Final = 5.0
# A conversation that takes longer holds up the others no more. Ordinary ones take a few milliseconds.
SLOW_SECONDS: Final = 0.1
MOST_PROCESSES: Final = 4
ATTEMPTS: Final = 2
RETRY_AFTER: Final = 1.0  # seconds, for the caller of a conversation whose process died in all attempts


@dataclass(eq=False)
class _Rendering:
    """A conversation on its way to its prompt, and the process that renders it now."""

    request: dict[str, Any]
    principal: str
    prompt: "Future[str]" = field(default_factory=Future)
    process: ChatProcess | None = None


class ChatRenderer:
    """Renders conversations by a chat template; the first one starts the first process.

    The processes take the interpreter's lock of this one for the conversion of messages only. All methods may be called
    from any thread.

    Args:
        sources: the template, which no file is read for again.
        most_seconds: the largest CPU time, in seconds, for one conversation.
        most_wait: the largest time, in seconds, for one attempt at it, without the start of a process.
    """

    def __init__(
        self, sources: TemplateSources, most_seconds: float = MOST_SECONDS, most_wait: float = MOST_WAIT
    ) -> None:
        self._sources, self._most_seconds, self._most_wait = sources, most_seconds, most_wait
        self._changed = threading.Condition()  # guards all below
        self._queue: ChatQueue[_Rendering] = ChatQueue(MOST_PROCESSES - 1)
        self._in_progress: set[_Rendering] = set()
        self._threads: set[threading.Thread] = set()  # each has a process
        self._num_idle = self._num_slow = 0
        self._is_closing = False

    def submit(
        self,
        messages: "Sequence[Message]",
        most_characters: int,
        principal: str = "",
        form: PromptForm = NEW_TURN,
    ) -> "Future[str]":
        """Returns the future prompt of a conversation, up to the start of the assistant's next turn.

        If the future is cancelled, the template is stopped.

        Args:
            messages: the messages; JSON can hold their values.
            most_characters: the largest number of characters of the prompt.
            principal: the caller; callers take turns.
            form: the form of the prompt.

        Raises:
            CheckpointError: (the future) the template is wrong.
            ConfigError: (the future) the template refuses the messages, or takes more time, memory or text than it may.
            WorkerDied: (the future) processes died or hung in all attempts, or the renderer was closed.
        """
        request = {"messages": messages, "most_characters": most_characters, "form": asdict(form)}
        conversation = _Rendering(request, principal)
        conversation.prompt.add_done_callback(partial(self._end_if_cancelled, weakref.ref(conversation)))
        with self._changed:
            self._queue.add(principal, conversation)
            self._changed.notify()
            self._add_thread()
        return conversation.prompt

    def close(self) -> None:
        """Ends the processes; prompts in progress fail."""
        with self._changed:
            self._is_closing = True
            waiting, threads = self._queue.drain(), list(self._threads)
            for conversation in self._in_progress:
                if conversation.process is not None:
                    conversation.process.kill()
            self._changed.notify_all()
        for conversation in waiting:
            _fail(conversation, _closed())
        for thread in threads:
            thread.join()

    def _end_if_cancelled(self, rendering: "weakref.ref[_Rendering]", prompt: "Future[str]") -> None:
        """Ends the process that renders a conversation whose caller has left.

        A prompt keeps its callbacks: one with the conversation, which has the prompt, would keep both for long.
        """
        conversation = rendering() if prompt.cancelled() else None
        if conversation is None:
            return
        with self._changed:
            if conversation.process is not None:
                conversation.process.kill()

    def _add_thread(self) -> None:
        """Starts a thread if a conversation waits and no other thread will take it soon; under the lock."""
        if self._num_idle or self._num_slow < len(self._threads) or len(self._threads) == MOST_PROCESSES:
            return
        if self._queue.can_take and not self._is_closing:
            thread = threading.Thread(target=self._run, name="tk-chat", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        process: ChatProcess | None = None
        while (conversation := self._next()) is not None:
            try:
                process = self._answer(conversation, process)
            except Exception as error:  # its caller must not wait for ever
                _fail(conversation, known_or_defect(error, "The thread of chat templates"))
                if process is not None:
                    process.end()
                process = None
            with self._changed:
                self._in_progress.discard(conversation)
                self._queue.end(conversation.principal)
                self._changed.notify()
        if process is not None:
            process.end()

    def _next(self) -> _Rendering | None:
        """Waits for the next conversation; returns None if this thread shall end: others are enough."""
        with self._changed:
            while not self._is_closing:
                conversation = self._queue.take()
                if conversation is not None:
                    self._in_progress.add(conversation)
                    return conversation
                if self._num_idle:
                    break
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            self._threads.discard(threading.current_thread())
            return None

    def _answer(self, conversation: _Rendering, process: ChatProcess | None) -> ChatProcess | None:
        """Gives a conversation its prompt, or the error; returns the process if it can go on."""
        ends: list[str] = []
        while len(ends) < ATTEMPTS:
            try:
                process = process or ChatProcess(self._sources, self._most_seconds, self._most_wait)
                answer = self._ask(process, conversation)
            except ChatProcessEnded as end:
                process = None
                if self._is_closing:
                    _fail(conversation, _closed())
                elif end.took_too_long:
                    _fail(conversation, ConfigError("the chat template takes too long for these messages"))
                if conversation.prompt.done():
                    return None
                ends.append(end.how)
                continue
            if answer is not None:
                _finish(conversation, answer)
            if process.is_killed:  # just when it had answered
                process.end()
                return None
            return process
        reasons = ", and another one ".join(ends)
        _fail(conversation, WorkerDied(f"The process of the chat template {reasons}. Ask again later.", RETRY_AFTER))
        return None

    def _ask(self, process: ChatProcess, conversation: _Rendering) -> dict[str, Any] | None:
        """Returns the answer of a process; None if the caller has left."""
        is_slow = False

        def on_slow() -> None:
            nonlocal is_slow
            with self._changed:
                is_slow = True
                self._num_slow += 1
                self._add_thread()

        with self._changed:
            if conversation.prompt.cancelled():
                return None
            conversation.process = process
            if self._is_closing:
                process.kill()
        try:
            process.get_ready()
            answer: dict[str, Any] = process.ask(conversation.request, SLOW_SECONDS, on_slow)
            return answer
        finally:
            with self._changed:
                conversation.process = None
                self._num_slow -= is_slow


def _finish(conversation: _Rendering, answer: dict[str, Any]) -> None:
    if "error" in answer:
        _fail(conversation, unpack(answer["error"]))
    elif conversation.prompt.set_running_or_notify_cancel():
        conversation.prompt.set_result(answer["text"])


def _fail(conversation: _Rendering, error: TkError) -> None:
    if conversation.prompt.set_running_or_notify_cancel():
        conversation.prompt.set_exception(error)


def _closed() -> TkError:
    return WorkerDied("The server ended before the chat template had rendered the conversation; ask another one.")
