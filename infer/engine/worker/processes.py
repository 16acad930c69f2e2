"""The processes of the workers: their start, on a thread that lives as long as they do, and their end.

This module imports little: a command starts its workers first, and imports the engine while they import theirs.
"""

import itertools
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from ....core.process import start_module
from .process_state import ProcessState

WORKER: Final = f"{__package__}.worker_entry"
EXIT_TIMEOUT: Final = 2.0  # seconds for a worker to end by itself
KILL_TIMEOUT: Final = 2.0  # seconds for the kernel to end a worker, which it cannot while that waits for a dead disk
_LOG: Final = logging.getLogger(__name__)


class WorkerProcesses:
    """One process per tensor-parallel rank, which waits for its job at the other end of a socket.

    The kernel ends a worker with the thread that started it, so these processes have a thread of their own. All methods
    may be called from any thread.

    Args:
        tp: the number of ranks.
        threads: the number of threads of each.
        module: the module that a process runs; its arguments are the descriptors of its socket, and of its loader's.
    """

    def __init__(self, tp: int, threads: int, module: str = WORKER) -> None:
        self._arguments = tp, threads, module
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: Future[list[tuple[socket.socket, socket.socket]]] = Future()
        self._closing, self._over = threading.Event(), threading.Event()
        arguments = (module, tp, worker_environment(threads))
        self._thread = threading.Thread(target=self._run, args=arguments, name="tk-workers", daemon=True)
        self._thread.start()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids, in rank order."""
        return tuple(process.pid for process in self._processes)

    def connections(self) -> Sequence[socket.socket]:
        """Returns the sockets to the processes, in rank order, when all processes have started.

        Raises:
            OSError: a process cannot be started.
        """
        return [connection for connection, _ in self._connections.result()]

    def loader_connections(self) -> Sequence[socket.socket]:
        """Returns the sockets to the loaders of adapters in the processes, as `connections` does."""
        return [connection for _, connection in self._connections.result()]

    def exit_code(self, rank: int, timeout: float) -> int | None:
        """Returns the exit code of a process, below 0 for a signal; None if it runs for `timeout` seconds more."""
        try:
            return self._processes[rank].wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def again(self) -> "WorkerProcesses":
        """Starts other processes of the same kind."""
        return WorkerProcesses(*self._arguments)

    def kill(self) -> None:
        """Kills all processes."""
        for process in self._processes:
            process.kill()

    def close(self, kill: bool = True) -> None:
        """Ends all processes: at once if `kill`, else after a time to end by themselves; a second call does nothing."""
        self._closing.set()
        failed = self._connections.exception() is not None  # waits for the start of one at most
        if kill:
            self.kill()  # before their connections close, or they would report the loss on stderr
        for connection in () if failed else itertools.chain.from_iterable(self._connections.result()):
            with suppress(OSError):  # the worker has ended
                connection.shutdown(socket.SHUT_RDWR)  # also if a fork of this process holds the socket too
            connection.close()
        for process in self._still_running(EXIT_TIMEOUT):
            process.kill()
        for process in self._still_running(KILL_TIMEOUT):
            state = ProcessState.of(process.pid).words
            _LOG.warning("Worker process %d is killed but has not ended; it is %s.", process.pid, state)
        self._over.set()
        self._thread.join()

    def _still_running(self, seconds: float) -> list[subprocess.Popen[bytes]]:
        """Returns the processes that have not ended after so many seconds."""
        end = time.monotonic() + seconds
        codes = [self.exit_code(rank, max(0.0, end - time.monotonic())) for rank in range(len(self._processes))]
        return [process for process, code in zip(self._processes, codes, strict=True) if code is None]

    def _run(self, module: str, tp: int, environment: dict[str, str]) -> None:
        try:
            connections: list[tuple[socket.socket, socket.socket]] = []
            while len(connections) < tp and not self._closing.is_set():
                connections.append(self._start(module, environment))
            self._connections.set_result(connections)
        except Exception as error:  # the thread's boundary: `connections` raises it
            self._connections.set_exception(error)
        self._over.wait()

    def _start(self, module: str, environment: dict[str, str]) -> tuple[socket.socket, socket.socket]:
        (ours, theirs), (our_loader, their_loader) = socket.socketpair(), socket.socketpair()
        descriptors = [theirs.fileno(), their_loader.fileno()]
        try:
            with theirs, their_loader:
                process = start_module(
                    module,
                    [str(each) for each in descriptors],
                    environment=environment,
                    inherited=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output is the command's own
                )
        except Exception:
            ours.close()
            our_loader.close()
            raise
        self._processes.append(process)
        return ours, our_loader


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
