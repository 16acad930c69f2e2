"""The engine's side of its workers: start, talk, notice a death at once, end."""

import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ..core.errors import Cancelled, WorkerDied
from ..core.process import start_module
from .ipc import Frame, error_from, receive, send
from .step_plan import SamplerOutput, StepPlan

EXIT_TIMEOUT: Final = 5.0  # seconds that a worker gets to end by itself


class WorkerGroup:
    """One process per tensor-parallel rank. All methods but `wake` are for the one thread that calls `start`.

    That thread must live as long as the group: the kernel ends a worker with the thread that started it.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks, in order."""
        return tuple(process.pid for process in self._processes)

    def start(self, job: Mapping[str, Any], tp: int, timeout: float) -> None:
        """Starts `tp` ranks and waits until each has loaded.

        Args:
            job: what every rank is told; its rank, tp and the ranks' meeting place are added.

        Raises:
            TkError: what a worker reported, of its own class; WorkerDied if one ended without a word or took longer
                than `timeout` seconds; Cancelled if `wake` was called.
        """
        deadline = time.monotonic() + timeout
        with tempfile.TemporaryDirectory(prefix="tk-infer-") as folder:
            for rank in range(tp):
                self._start_rank(rank, tp)
                frame = Frame("start", {**job, "rank": rank, "tp": tp, "store": f"{folder}/store"})
                with suppress(WorkerDied):  # one that is gone is told about below, by name
                    send(self._connections[rank], frame)
            loading = set(range(tp))
            while loading:
                spoken = self._wait_for_ranks(deadline)
                if spoken is None:
                    raise Cancelled("The engine was closed while it was starting.")
                for rank in spoken:
                    frame = self._receive(rank)
                    if frame.op == "error":
                        raise error_from(frame)
                    loading.remove(rank)

    def step(self, plan: StepPlan, timeout: float) -> SamplerOutput:
        """Has every rank carry out a plan; what rank 0 answers.

        Raises:
            WorkerDied: one is gone, reported a fault, or did not answer within `timeout` seconds.
        """
        frame = Frame("step", arrays=plan.arrays())
        deadline = time.monotonic() + timeout
        for connection in self._connections:
            connection.settimeout(timeout)
            with suppress(WorkerDied):  # one that is gone is told about below, by name
                send(connection, frame)
        while True:
            for rank in self._wait_for_ranks(deadline) or ():
                answer = self._receive(rank)
                if answer.op == "error":
                    raise WorkerDied(str(error_from(answer)))
                return SamplerOutput.from_arrays(answer.arrays)

    def sleep(self) -> None:
        """Returns when `wake` is called. Raises WorkerDied as soon as a worker is gone."""
        for rank in self._wait_for_ranks(None) or ():
            raise WorkerDied(f"Inference rank {rank} spoke out of turn ({self._receive(rank).op}).")

    def wake(self) -> None:
        """Ends a `sleep` or `start`; lost if there is none. From any thread."""
        with suppress(OSError):  # it is full of wake-ups already, or closed
            self._wake_up.send(b"w")

    def close(self, kill: bool = False) -> None:
        """Ends all processes, which get a while to do so by themselves unless `kill`. Idempotent."""
        for process in self._processes if kill else ():
            process.kill()  # before they notice that a connection is closed, and complain
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

    def _start_rank(self, rank: int, tp: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_module(
                f"{__package__}.worker_entry",
                [str(theirs.fileno())],
                environment=worker_environment(tp),
                inherited=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the command's own
            )
        self._processes.append(process)
        self._connections.append(ours)
        self._selector.register(ours, selectors.EVENT_READ, rank)

    def _wait_for_ranks(self, deadline: float | None) -> list[int] | None:
        """Ranks that have something to say; None if woken instead. Raises WorkerDied after the deadline."""
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
            process.wait(1.0)
        how = "closed its connection" if process.returncode is None else _describe_exit(process.returncode)
        raise WorkerDied(f"Inference rank {rank} (process {process.pid}) {how}; see its messages on stderr.")


def worker_environment(tp: int) -> dict[str, str]:
    """Variables of a worker, where they are not set: the cores are shared out among the ranks."""
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // tp)),
        # Threads that wait for one which has no core should not spin long: measured on 2 cores, this costs a fifth of
        # the speed of an idle machine and is several times faster on a busy one.
        "GOMP_SPINCOUNT": "5000",
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
    }
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
