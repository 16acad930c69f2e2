"""The engine's side of its workers: their jobs, messages, deaths and end."""

import selectors
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

import numpy as np

from ...core.errors import Cancelled, WorkerDied
from ..planning.job import Job
from ..scheduling.steps.step_plan import Array, SamplerOutput
from .ipc import Frame, error_from, receive, send
from .processes import WorkerProcesses

REPORT_TIMEOUT: Final = 0.2  # seconds for the kernel to report how a process ended whose connection is closed


class WorkerGroup:
    """The workers of an engine.

    Only the thread that calls `start` may call the other methods, except `wake` and `kill`.

    Args:
        processes: their processes, which the group ends.
    """

    def __init__(self, processes: WorkerProcesses) -> None:
        self._processes = processes
        self._connections: Sequence[socket.socket] = ()
        self._uninformed: list[socket.socket] = []  # of ranks that do not sample the tokens that they need
        self._is_closing = self._is_killed = False
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids, in rank order."""
        return self._processes.process_ids

    def start(self, job: Job, timeout: float) -> str:
        """Gives the ranks their jobs, waits until each has loaded, and returns the kernels of rank 0 (see `Backend`).

        Args:
            job: the job that every rank receives, with its number and the file of the rendezvous.
            timeout: the time to load, in seconds.

        Raises:
            TkError: a worker reported an error, which keeps its class.
            WorkerDied: a worker ended without a report, or did not load in time.
            Cancelled: `wake` was called to close the group.
        """
        deadline = time.monotonic() + timeout
        self._connections = self._processes.connections()
        with tempfile.TemporaryDirectory(prefix="tk-infer-") as folder:
            for rank, connection in enumerate(self._connections):
                self._register(connection, rank)
                frame = Frame("start", asdict(replace(job, rank=rank, store=f"{folder}/store")))
                with suppress(WorkerDied):  # `_receive` below reports a dead rank by its number
                    send(connection, frame)
            loading, kernels = set(range(job.tp)), ""
            while loading:
                spoken = self._wait_for_ranks(deadline)
                if self._is_closing:
                    raise Cancelled("The engine was closed while it was starting.")
                for rank in spoken or ():
                    frame = self._receive(rank)
                    if frame.op == "error":
                        raise error_from(frame)
                    loading.remove(rank)
                    if not frame.values["samples"]:
                        self._uninformed.append(self._connections[rank])
                    kernels = frame.values["kernels"] if rank == 0 else kernels
            return kernels

    def _register(self, connection: socket.socket, rank: int) -> None:
        try:
            self._selector.register(connection, selectors.EVENT_READ, rank)
        except ValueError as error:  # another thread has closed the processes, and with them their connections
            raise Cancelled("The workers were closed while they were starting.") from error

    def restart(self, job: Job, timeout: float) -> float:
        """Ends the processes, starts others with the same job as `start` does, and returns the seconds that it took.

        Raises:
            WorkerDied: also if `kill` was called, which is for good.
        """
        begun = time.monotonic()
        for connection in self._connections:
            self._selector.unregister(connection)
        self._connections, self._uninformed = (), []
        self._processes.close()
        self._processes = self._processes.again()
        if self._is_killed:  # perhaps too early for these processes
            raise WorkerDied("The inference workers were killed.")
        self.start(job, timeout)
        return time.monotonic() - begun

    def send(self, message: bytes, timeout: float) -> None:
        """Sends the message of a step to every rank, which computes it after those before it.

        A rank that cannot be reached is reported by `receive`.
        """
        self._send(Frame("step", body=message), self._connections, timeout)

    def send_masks(self, masks: Array, timeout: float) -> None:
        """Sends the masks of the last step, uint32 [M, W], to the ranks that sample; they wait for them.

        All steps before it must be answered already.
        """
        self._send(Frame("masks", body=_array(masks)), self._sampling, timeout)

    def sample_again(self, rows: Array, masks: Array, timeout: float) -> None:
        """Lets the ranks that sample do that again for the last step that was answered, which has candidates.

        Args:
            rows: the numbers of rows, int32 [M], whose masks are given.
            masks: uint32 [M, W].
        """
        body = _array(masks) + rows.tobytes()
        self._send(Frame("again", body=body), self._sampling, timeout)

    def send_tokens(self, tokens: Array, timeout: float, are_chosen: bool = False) -> None:
        """Sends the tokens of the last step that was answered to the ranks that wait for them.

        Args:
            tokens: int32 [R].
            are_chosen: whether the step had candidates, so that no rank knows its tokens.
        """
        waiting = self._connections if are_chosen else self._uninformed
        if waiting:
            self._send(Frame("tokens", body=tokens.tobytes()), waiting, timeout)

    def receive(self, timeout: float) -> SamplerOutput:
        """Returns the answer of rank 0 to the oldest step without one. `send_tokens` must follow.

        Raises:
            WorkerDied: a rank ended, reported an error, or did not answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            for rank in self._wait_for_ranks(deadline) or ():
                answer = self._receive(rank)
                if answer.op == "error":
                    raise WorkerDied(str(error_from(answer)))
                return SamplerOutput.decode(answer.body)

    def sleep(self) -> None:
        """Returns when `wake` is called.

        Raises:
            WorkerDied: a worker has ended.
        """
        for rank in self._wait_for_ranks(None) or ():
            raise WorkerDied(f"Inference rank {rank} sent an unexpected message ({self._receive(rank).op}).")

    def wake(self, closing: bool = False) -> None:
        """Ends a `sleep`, from any thread; if the group is to be closed, a `start` too."""
        self._is_closing |= closing
        with suppress(OSError):  # the socket is full of wake-ups already, or closed
            self._wake_up.send(b"w")

    def kill(self) -> None:
        """Kills all processes, from any thread; `step` and `sleep` then raise WorkerDied."""
        self._is_killed = True
        self._processes.kill()

    def close(self, kill: bool = False) -> None:
        """Ends all processes: at once if `kill`, else after a time to end by themselves; a second call does nothing."""
        self._processes.close(kill)
        self._selector.close()
        self._wake_up.close()
        self._woken.close()

    @property
    def _sampling(self) -> list[socket.socket]:
        """The connections to the ranks that sample."""
        return [connection for connection in self._connections if connection not in self._uninformed]

    def _send(self, frame: Frame, connections: Sequence[socket.socket], timeout: float) -> None:
        data = frame.encode()
        for connection in connections:
            if connection.gettimeout() != timeout:
                connection.settimeout(timeout)
            with suppress(WorkerDied):  # `_receive` reports a dead rank by its number
                send(connection, data)

    def _wait_for_ranks(self, deadline: float | None) -> list[int] | None:
        """Waits for messages and returns the ranks that sent one, or None after `wake`.

        Raises:
            WorkerDied: the deadline has passed.
        """
        ready = self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerDied("The inference workers did not answer in time; see their messages on stderr.")
        ranks = [key.data for key, _ in ready if key.data is not None]
        if not ranks:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        return ranks or None

    def _receive(self, rank: int) -> Frame:
        frame = receive(self._connections[rank])
        if frame is not None:
            return frame
        code = self._processes.exit_code(rank, REPORT_TIMEOUT)
        how = "closed its connection" if code is None else _describe_exit(code)
        process_id = self._processes.process_ids[rank]
        raise WorkerDied(f"Inference rank {rank} (process {process_id}) {how}; see its messages on stderr.")


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _array(values: Array) -> bytes:
    """Returns the shape and the values of an array of two axes."""
    return np.array(values.shape, np.int32).tobytes() + values.tobytes()
