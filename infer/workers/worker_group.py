"""The engine's side of its workers: their start, messages, deaths and end."""

import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

from ...core.errors import Cancelled, WorkerDied
from ...core.process import start_module
from ..planning.job import Job
from ..scheduling.step_plan import SamplerOutput
from .ipc import Frame, error_from, receive, send

WORKER: Final = f"{__package__}.worker_entry"
EXIT_TIMEOUT: Final = 5.0  # seconds for a worker to end by itself
REPORT_TIMEOUT: Final = 0.2  # seconds for the kernel to report how a process ended whose connection is closed


class WorkerGroup:
    """One process per tensor-parallel rank.

    Only the thread that calls `start` may call the other methods, except `wake` and `kill`. The thread must live as
    long as the group: the kernel ends a worker with the thread that started it.

    Args:
        module: the module that a process runs, with the descriptor of its socket as argument.
    """

    def __init__(self, module: str = WORKER) -> None:
        self._module = module
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._uninformed: list[socket.socket] = []  # of ranks that do not sample the tokens that they need
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids, in rank order."""
        return tuple(process.pid for process in self._processes)

    def start(self, job: Job, timeout: float) -> str:
        """Starts the ranks, waits until each has loaded, and returns the kernels of rank 0 (see `Backend`).

        Args:
            job: the job that every rank receives, with its number and the file of the rendezvous.
            timeout: the time to load, in seconds.

        Raises:
            TkError: a worker reported an error, which keeps its class.
            WorkerDied: a worker ended without a report, or did not load in time.
            Cancelled: `wake` was called.
        """
        deadline = time.monotonic() + timeout
        with tempfile.TemporaryDirectory(prefix="tk-infer-") as folder:
            for rank in range(job.tp):
                self._start_rank(rank, job.threads)
                frame = Frame("start", asdict(replace(job, rank=rank, store=f"{folder}/store")))
                with suppress(WorkerDied):  # `_receive` below reports a dead rank by its number
                    send(self._connections[rank], frame)
            loading, kernels = set(range(job.tp)), ""
            while loading:
                spoken = self._wait_for_ranks(deadline)
                if spoken is None:
                    raise Cancelled("The engine was closed while it was starting.")
                for rank in spoken:
                    frame = self._receive(rank)
                    if frame.op == "error":
                        raise error_from(frame)
                    loading.remove(rank)
                    if not frame.values["samples"]:
                        self._uninformed.append(self._connections[rank])
                    kernels = frame.values["kernels"] if rank == 0 else kernels
            return kernels

    def send(self, message: bytes, timeout: float) -> None:
        """Sends the message of a step to every rank, which computes it after those before it.

        A rank that cannot be reached is reported by `receive`.
        """
        self._send(Frame("step", body=message), self._connections, timeout)

    def receive(self, timeout: float) -> SamplerOutput:
        """Returns the answer of rank 0 to the oldest step without one.

        Raises:
            WorkerDied: a rank ended, reported an error, or did not answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            for rank in self._wait_for_ranks(deadline) or ():
                answer = self._receive(rank)
                if answer.op == "error":
                    raise WorkerDied(str(error_from(answer)))
                output = SamplerOutput.decode(answer.body)
                self._send(Frame("tokens", body=output.token_ids.tobytes()), self._uninformed, timeout)
                return output

    def sleep(self) -> None:
        """Returns when `wake` is called.

        Raises:
            WorkerDied: a worker has ended.
        """
        for rank in self._wait_for_ranks(None) or ():
            raise WorkerDied(f"Inference rank {rank} sent an unexpected message ({self._receive(rank).op}).")

    def wake(self) -> None:
        """Ends a `sleep` or `start`, from any thread."""
        with suppress(OSError):  # the socket is full of wake-ups already, or closed
            self._wake_up.send(b"w")

    def kill(self) -> None:
        """Kills all processes, from any thread; `step` and `sleep` then raise WorkerDied."""
        for process in self._processes:
            process.kill()

    def close(self, kill: bool = False) -> None:
        """Ends all processes: at once if `kill`, else after a time to end by themselves; a second call does nothing."""
        if kill:
            self.kill()  # before their connections close, or they would report the loss on stderr
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + EXIT_TIMEOUT
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes:
            process.wait()
        self._selector.close()
        self._wake_up.close()
        self._woken.close()

    def _send(self, frame: Frame, connections: Sequence[socket.socket], timeout: float) -> None:
        data = frame.encode()
        for connection in connections:
            if connection.gettimeout() != timeout:
                connection.settimeout(timeout)
            with suppress(WorkerDied):  # `_receive` reports a dead rank by its number
                send(connection, data)

    def _start_rank(self, rank: int, threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_module(
                self._module,
                [str(theirs.fileno())],
                environment=worker_environment(threads),
                inherited=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the command's own
            )
        self._processes.append(process)
        self._connections.append(ours)
        self._selector.register(ours, selectors.EVENT_READ, rank)

    def _wait_for_ranks(self, deadline: float | None) -> list[int] | None:
        """Waits for messages and returns the ranks that sent one, or None after `wake`.

        Raises:
            WorkerDied: the deadline has passed.
        """
        ready = self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerDied("The inference workers did not answer in time.")
        ranks = [key.data for key, _ in ready if key.data is not None]
        if not ranks:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        return ranks or None

    def _receive(self, rank: int) -> Frame:
        frame = receive(self._connections[rank])
        if frame is not None:
            return frame
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(REPORT_TIMEOUT)
        how = "closed its connection" if process.returncode is None else _describe_exit(process.returncode)
        raise WorkerDied(f"Inference rank {rank} (process {process.pid}) {how}; see its messages on stderr.")


def worker_environment(threads: int) -> dict[str, str]:
    """Returns the environment variables to set for a worker of so many threads; most that are set are kept."""
    defaults = {
        # Threads should not spin long while they wait for a thread that has no core. Measured on 2 cores: a fifth
        # slower on an idle machine, several times faster on a busy one.
        "GOMP_SPINCOUNT": "5000",
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
    }
    chosen = {name: value for name, value in defaults.items() if name not in os.environ}
    return {"OMP_NUM_THREADS": str(threads), **chosen}


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
