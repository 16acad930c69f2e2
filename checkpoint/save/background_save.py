"""The rank's side of a background save: memory shared with a writer process, and one save in flight."""

import json
import mmap
import os
import select
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from ...core.casts import Array
from ...core.errors import TkError, WorkerDied, unpack
from ...core.ownership import Owned
from ...core.process import start_module
from ..format.step_names import step_name
from .save_job import Buffers, SaveJob
from .saved_step import SavedStep
from .state_source import Segments, StateSource

WORKER: Final = f"{__package__}.save_worker"
EXIT_TIMEOUT: Final = 10.0  # seconds for an idle writer to end by itself


class BackgroundSaver:
    """A writer process of one rank. For each save: call `wait`, fill the `buffer` of every item, and call `begin`.

    The kernel ends the writer with the thread that made this object, so that thread should live as long as the run.

    Args:
        job: the settings of all saves.
        lock_fd: the descriptor of the run folder's lock, which the writer then holds too; -1 if another rank holds it.
        source: the file from which the writer reads some slots; they have no buffers.
        worker: the module that the writer process runs.
    """

    def __init__(
        self, job: SaveJob, lock_fd: int = -1, source: StateSource | None = None, worker: str = WORKER
    ) -> None:
        self.job = job
        self.source = source or StateSource(-1, ())
        self._buffers = Buffers(job, self.source.slots)
        memory = os.memfd_create("tk-save", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, max(self._buffers.nbytes, 1))
            self._memory = memoryview(mmap.mmap(memory, 0))
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = _start(worker, theirs.fileno(), memory, lock_fd, self.source)
        finally:
            os.close(memory)
        self._answers = self._socket.makefile("r", encoding="utf-8")
        self._in_flight: int | None = None
        self._answer = ""  # of the save in flight, read before `wait` asks for it
        self._send(job.to_json())

    @property
    def process_id(self) -> int:
        """The writer's process id."""
        return self._process.pid

    @property
    def memory(self) -> memoryview:
        """The shared memory, in which all buffers are; as long as it is used, this object must live."""
        return self._memory

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory, equal to the bytes that this rank writes from it at each save."""
        return self._buffers.nbytes

    def buffer(self, item: Owned) -> Array:
        """Returns the 1-D buffer for an item's elements; do not change it while a save is in flight."""
        return self._buffers.view(self._memory, item)

    def begin(self, step: int, resume: Mapping[str, Any], segments: Segments = MappingProxyType({})) -> None:
        """Starts a save of the buffers' values.

        Args:
            step: the training step.
            resume: the state of the run, plain JSON.
            segments: the places in the source of items that have no buffer.

        Raises:
            WorkerDied: the writer has died.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight} is still being saved")
        self._in_flight = step
        places = [[index, segments[item]] for index, item in enumerate(self.job.items()) if item in segments]
        self._send({"step": step, "resume": dict(resume), "segments": places})

    def news(self) -> SavedStep | None:
        """Returns the step that the save in flight has committed, without waiting; `wait` then raises or returns None.

        It is None if the save goes on or has failed, if it was returned before, and on ranks other than 0.
        """
        if self._in_flight is None or self._answer or not self._has_answered(0):
            return None
        self._answer = self._read_answer()
        return self._saved_in(self._answer)

    def wait(self, timeout: float | None = None) -> SavedStep | None:
        """Returns once no save is in flight, or after `timeout` seconds.

        Returns:
            The step that was committed, on rank 0, unless `news` has returned it.

        Raises:
            TkError: the last save failed; the error has the class that the writer raised.
            WorkerDied: the writer has died.
        """
        if self._in_flight is None:
            return None
        if timeout is not None and not self._answer and not self._has_answered(timeout):
            return None
        known, self._answer = self._answer, ""
        line = known or self._read_answer()
        if not line:
            raise self._death()
        self._in_flight = None
        if "error" in (answer := json.loads(line)):
            raise unpack(answer["error"])
        return None if known else self._saved_in(line)

    def _read_answer(self) -> str:
        """Returns the line of the writer's answer; "" if the writer has died."""
        try:
            return self._answers.readline()
        except OSError:
            return ""

    def _saved_in(self, answer: str) -> SavedStep | None:
        """Returns the saved step of an answer, by the name that the job has for it."""
        saved = json.loads(answer).get("saved") if answer else None
        return SavedStep(**saved | {"path": str(self.job.run / step_name(saved["step"]))}) if saved else None

    def _has_answered(self, timeout: float) -> bool:
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout))

    def close(self) -> None:
        """Ends the writer and abandons a save in flight. Idempotent."""
        if self._in_flight is not None:
            self._process.kill()
        self._answers.close()
        with suppress(OSError):  # the writer has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # also if a fork of this process holds the socket too
        self._socket.close()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._death() from None

    def _death(self) -> TkError:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        step = "" if self._in_flight is None else f"Step {self._in_flight} was not saved: "
        self._in_flight = None
        return WorkerDied(
            f"{step}the process that writes rank {self.job.writer}'s checkpoints {how}. See its messages on stderr. "
            "Steps committed before are whole."
        )


def _start(worker: str, connection: int, memory: int, lock_fd: int, source: StateSource) -> subprocess.Popen[bytes]:
    shared = [connection, memory, *(fd for fd in (lock_fd, source.fd) if fd >= 0)]
    return start_module(
        worker,
        [str(connection), str(memory), str(source.fd), *source.slots],
        inherited=shared,
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is the command's own
    )
