"""The server's side of a process that renders conversations: its start, one question at a time, and its end."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ..core.console_log import shown_form
from ..core.process import start_module
from .template_files import TemplateSources

PROCESS: Final = f"{__package__}.chat_process"
START_SECONDS: Final = 60.0  # for the start, which reads many files: a disk may stall for seconds
_LOOK_SECONDS: Final = 0.25  # between two looks for an answer, at most
_GAP_SECONDS: Final = 0.5  # that count between two looks: in a longer gap this process was stopped, too, or had no core
_READ_BYTES: Final = 1 << 20
# The share of its CPU time that a process without an answer has used if it computes on a busy machine: it is no hang.
_COMPUTING: Final = 0.1


class ChatProcessEnded(Exception):
    """A process that has ended, or that hung and was ended.

    Attributes:
        how: how it ended, in words.
        took_too_long: whether it took more CPU time than it may, or so much that it did not hang but compute.
    """

    def __init__(self, how: str, took_too_long: bool = False) -> None:
        super().__init__(how)
        self.how, self.took_too_long = how, took_too_long


class ChatProcess:
    """A process of its own, which one thread asks; the kernel ends it with the thread that made it.

    `get_ready` must come before the first question.

    Args:
        sources: the template.
        cpu_seconds: the largest CPU time for a question.
        wall_seconds: the largest time for a question, without gaps in which this process itself did not run.

    Attributes:
        is_killed: whether `kill` was called.

    Raises:
        ChatProcessEnded: the system cannot start another process.
    """

    def __init__(self, sources: TemplateSources, cpu_seconds: float, wall_seconds: float) -> None:
        self._sources, self._cpu_seconds, self._wall_seconds = sources, cpu_seconds, wall_seconds
        self._is_ready = self.is_killed = False
        with ExitStack() as stack:
            try:
                self._socket, theirs = map(stack.enter_context, socket.socketpair())
                arguments, end = (str(cpu_seconds), shown_form() or "text"), theirs.fileno()
                self._process = start_module(PROCESS, arguments, stdin=end, stdout=end)
            except OSError as error:
                raise ChatProcessEnded(f"could not be started ({error.strerror})") from error
            theirs.close()
            stack.pop_all()
        self._socket.setblocking(False)

    def get_ready(self) -> None:
        """Waits until the process has the template; returns at once if it has. Raises as `ask`."""
        if not self._is_ready:
            self._ask(self._sources._asdict() | {"variables": dict(self._sources.variables)}, START_SECONDS)
            self._is_ready = True

    def ask(self, request: dict[str, Any], slow_after: float = 0.0, on_slow: Callable[[], None] = lambda: None) -> Any:
        """Returns the answer to a request.

        Args:
            request: the request; JSON can hold its values.
            slow_after: the seconds after which `on_slow` is called, once, if there is no answer yet.
            on_slow: see `slow_after`; called on this thread.

        Raises:
            ChatProcessEnded: the process ended, or did not answer in time and was ended.
        """
        return self._ask(request, self._wall_seconds, slow_after, on_slow)

    def _ask(
        self,
        request: dict[str, Any],
        most_seconds: float,
        slow_after: float = 0.0,
        on_slow: Callable[[], None] = lambda: None,
    ) -> Any:
        left, parts = memoryview(json.dumps(request).encode() + b"\n"), [b""]
        poll, is_slow, used = select.poll(), False, 0.0
        seconds, looked = 0.0, time.monotonic()
        while not parts[-1].endswith(b"\n"):
            now = time.monotonic()
            seconds, looked = seconds + min(now - looked, _GAP_SECONDS), now
            if seconds >= slow_after and not is_slow:
                is_slow, used = True, self._cpu_time()
                on_slow()
            if seconds >= most_seconds:
                computed = self._cpu_time() - used > _COMPUTING * self._cpu_seconds
                self.end()
                raise ChatProcessEnded(f"did not answer within {most_seconds:g} s", computed)
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if left else 0))
            wait = min(_LOOK_SECONDS, (most_seconds if is_slow else min(slow_after, most_seconds)) - seconds)
            for _, events in poll.poll(1000 * wait + 1):
                try:
                    if events & select.POLLOUT:
                        left = left[self._socket.send(left) :]
                    if events & ~select.POLLOUT:
                        parts.append(self._received())
                except OSError as error:
                    raise self._ended() from error
        answer = b"".join(parts)
        return json.loads(answer) if answer != b"\n" else None

    def _cpu_time(self) -> float:
        """Returns the CPU time that the process has used, in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _received(self) -> bytes:
        part = self._socket.recv(_READ_BYTES)
        if not part:
            raise self._ended()
        return part

    def _ended(self) -> ChatProcessEnded:
        """Takes leave of a process that has closed its connection, and says how it ended."""
        self._process.kill()  # if it lives all the same; otherwise this changes nothing
        code = self._process.wait()
        self._socket.close()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ChatProcessEnded(how, code == -signal.SIGPROF)

    def kill(self) -> None:
        """Ends the process, from any thread; a question in progress raises ChatProcessEnded, no other may follow."""
        self.is_killed = True
        self._process.kill()

    def end(self) -> None:
        """Ends the process and takes leave of it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
