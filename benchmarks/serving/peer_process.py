"""A peer of bench_serving.py in a process of its own, which runs one workload at a time (peers/serve_loop.py)."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tk.benchmarks.peers.environments import peer_environment
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload

_KEPT: Final = ("PATH", "HOME", "LANG")  # of this process's environment

_GRACE: Final = 5.0  # seconds


class PeerFailed(Exception):
    """A peer's process ended or did not answer; the message has the last line that it printed."""


class PeerProcess:
    """A peer that has loaded a model.

    Attributes:
        name: the peer's name.
        ready_seconds: the time from its start until it had loaded the model and warmed up.

    Args:
        name: the peer's name.
        command: an interpreter, a module of benchmarks/peers and its arguments.
        log: the file for what it prints.
        timeout: the seconds that a load or a workload may take.

    Raises:
        PeerFailed: it cannot load the model.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, timeout: float = 600.0) -> None:
        self.name = name
        self._log, self._timeout = log, timeout
        environment = {key: os.environ[key] for key in _KEPT if key in os.environ} | peer_environment()
        environment["PYTHONUNBUFFERED"] = "1"  # the log's last line is the last that it printed
        start = time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,  # its own processes end with it
            )
        assert self._process.stdin is not None  # pipes
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._reply()
        self.ready_seconds = time.perf_counter() - start

    def run(self, workload: SpeedWorkload) -> Speeds:
        """Runs a workload.

        Raises:
            PeerFailed: it cannot; the process is ended.
        """
        if self._input.closed:
            raise self._failure()
        try:
            self._input.write(json.dumps(asdict(workload)).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure() from None
        speeds: Speeds = self._reply()
        return speeds

    def close(self) -> None:
        """Ends the process, which may still say why it fails, and those that it started."""
        self._input.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def _reply(self) -> Any:
        answered, _, _ = select.select([self._output], [], [], self._timeout)
        line = self._output.readline() if answered else b""
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> PeerFailed:
        self.close()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return PeerFailed(f"{self.name} failed: {lines[-1] if lines else 'it printed nothing'} (see {self._log})")
