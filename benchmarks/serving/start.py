"""The start of `tk serve` in processes of its own: the time until it is ready, and what it holds in memory then."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerStart:
    """A start.

    Attributes:
        ready_seconds: the time from the start of the process until it prints that it is ready.
        resident_bytes: the resident memory of all its processes, pages that several share counted in each.
        own_bytes: the same with shared pages divided among the processes that have them.
    """

    ready_seconds: float
    resident_bytes: int
    own_bytes: int


def measure_start(path: Path, threads: int, tp: int = 1) -> ServerStart:
    """Starts a server, measures it, and ends it.

    Raises:
        RuntimeError: it ended without being ready; the message has the last that it printed.
    """
    command = [
        sys.executable,
        "-m",
        "tk",
        "serve",
        str(path),
        "--port",
        "0",
        "--tp",
        str(tp),
        "--threads",
        str(threads),
    ]
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        try:
            assert server.stdout is not None  # a pipe
            while not (line := server.stdout.readline()).startswith("ready"):
                if not line:
                    errors.seek(0)
                    raise RuntimeError(
                        f"`{' '.join(command)}` ended before it was ready: {errors.read().strip()[-500:]}"
                    )
            ready = time.perf_counter() - start
            processes = list(descendants(server.pid))
            resident, own = (sum(rolled_up(pid, field) for pid in processes) for field in ("Rss", "Pss"))
        finally:
            server.send_signal(signal.SIGTERM)
    return ServerStart(ready, resident, own)


def descendants(pid: int) -> Iterator[int]:
    """Yields a process and all that it started, directly or not."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from descendants(int(child))


def rolled_up(pid: int, field: str) -> int:
    """Returns a field of /proc/PID/smaps_rollup, in bytes."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    if not found:
        raise RuntimeError(f"/proc/{pid}/smaps_rollup has no {field}.")
    return int(found[1]) * 1024
