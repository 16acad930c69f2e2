"""The rank's side of a background save: memory shared with a writer process, and one save in flight."""

import json
import mmap
import os
import select
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...core.casts import Array
from ...core.errors import TkError, WorkerDied, unpack
from ...core.ownership import Owned
from ...core.process import start_module
from .save_job import Buffers, SaveJob

WORKER: Final = f"{__package__}.save_worker"
EXIT_TIMEOUT: Final = 10.0  # seconds for an idle writer to end by itself


class BackgroundSaver:
    """A writer process of one rank. For each save: call `wait`, fill the `buffer` of every item, and call `begin`.

    The kernel ends the writer with the thread that made this object, so that thread should live as long as the run.

    Args:
        job: the settings of all saves.
        lock_fd: the descriptor of the run folder's lock, which the writer then holds too; -1 if another rank holds it.
        worker: the module that the writer process runs.
    """

    def __init__(self, job: SaveJob, lock_fd: int = -1, worker: str = WORKER) -> None:
        self.job = job
        self._buffers = Buffers(job)
        memory = os.memfd_create("tk-save", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, max(self._buffers.nbytes, 1))
            self._memory = memoryview(mmap.mmap(memory, 0))
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = _start(worker, theirs.fileno(), memory, lock_fd)
        finally:
            os.close(memory)
        self._answers = self._socket.makefile("r", encoding="utf-8")
        self._in_flight: int | None = None
        self._send(job.to_json())

    @property
    def process_id(self) -> int:
        """The writer's process id."""
        return self._process.pid

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory, equal to the bytes that this rank writes at each save."""
        return self._buffers.nbytes

    def buffer(self, item: Owned) -> Array:
        """Returns the 1-D buffer for an item's elements; do not change it while a save is in flight."""
        return self._buffers.view(self._memory, item)

    def begin(self, step: int, resume: Mapping[str, Any]) -> None:
        """Starts a save of the buffers' values. Raises WorkerDied if the writer has died."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight} is still being saved")
        self._in_flight = step
        self._send({"step": step, "resume": dict(resume)})

    def wait(self, timeout: float | None = None) -> None:
        """Returns once no save is in flight, or after `timeout` seconds.

        Raises:
            TkError: the last save failed; the error has the class that the writer raised.
            WorkerDied: the writer has died.
        """
        if self._in_flight is None:
            return
        if timeout is not None and not self._has_answered(timeout):
            return
        try:
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line:
            raise self._death()
        self._in_flight = None
        answer = json.loads(line)
        if answer:
            raise unpack(answer["error"])

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


def _start(worker: str, connection: int, memory: int, lock_fd: int) -> subprocess.Popen[bytes]:
    shared = [connection, memory] + ([lock_fd] if lock_fd >= 0 else [])
    return start_module(
        worker,
        [str(connection), str(memory)],
        inherited=shared,
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is the command's own
    )
