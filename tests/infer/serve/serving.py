"""`tk serve` and other commands as processes of their own, for tests."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.tests.child_processes import child_ids

READY_SECONDS = 90.0
WAIT_SECONDS = 60.0


def shared_memory() -> set[str]:
    """The names of all shared memory. Folders are there, too: those of tests that run at the same time."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


@contextmanager
def stopped(worker: int) -> Iterator[None]:
    """A time in which no step of a worker ends, so that what is live stays so."""
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


class Command:
    """A running `tk` command and the workers that it started."""

    def __init__(
        self, *words: str, ignored: tuple[int, ...] = (), log: int | None = None, open_files: int | None = None
    ) -> None:
        """Starts the command.

        Args:
            open_files: the most open files of the command; None = as many as of this process.
            ignored: the signals that it inherits as ignored.
            log: the file of its standard error; None = one of its own, which `wait` reads.
        """

        trap = "".join(f"trap '' {number}; " for number in ignored)  # gRPC's threads here forbid a preexec_fn
        trap += "" if open_files is None else f"ulimit -n {open_files}; "
        command = ["/bin/sh", "-c", f'{trap}exec "$@"', "sh", sys.executable, "-m", "tk", *words]
        # A file: nothing reads a pipe before the end, and a server whose log fills one would wait for a reader.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log or self._errors, text=True)

    def end(self, number: int) -> tuple[int, str, str]:
        """Exit code, what was left of stdout, and stderr, after a signal."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str, str]:
        stdout, _ = self.process.communicate(timeout=WAIT_SECONDS)
        self._errors.seek(0)
        return self.process.returncode, stdout, self._errors.read()

    def worker_ids(self) -> list[int]:
        """Process ids of its children."""
        return child_ids(self.process.pid)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._errors.close()


class Serving(Command):
    """A `tk serve` process and, once it said so, its address."""

    def __init__(
        self, *arguments: str, ignored: tuple[int, ...] = (), log: int | None = None, open_files: int | None = None
    ) -> None:
        super().__init__("serve", *arguments, "--port", "0", ignored=ignored, log=log, open_files=open_files)
        self.target = ""

    def wait_ready(self) -> "Serving":
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        line = self.process.stdout.readline() if poll.poll(1000 * READY_SECONDS) else ""
        assert line.startswith("ready 127.0.0.1:"), line or self.end(signal.SIGKILL)
        self.target = line.split()[1]
        return self

    def wait_draining(self) -> None:
        """Returns when the server says that it takes no new requests."""
        with grpc.insecure_channel(self.target) as channel:
            request = health_pb2.HealthCheckRequest(service="tk.v1.Generation")
            for update in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=WAIT_SECONDS):
                if update.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
