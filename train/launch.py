"""Starts local ranks, passes signals on to them, and tears all of them down together.

Under torchrun this is not used: there a rank is what torchrun started. No torch is imported here.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..core import errors
from ..core.errors import TkError, WorkerDied

ERROR_FOLDER_VARIABLE = "TK_ERROR_FOLDER"
RENDEZVOUS_VARIABLE = "TK_RENDEZVOUS"
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # that peers of a dead rank get to report what they saw


class Launcher:
    """One job of `num_ranks` local processes running `python -m MODULE ARGS`.

    Args:
        log_folder: takes rank-N.log of every rank but 0, whose output is this process's.
        stop_timeout: seconds from the first signal until ranks are killed.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], num_ranks: int, log_folder: Path, stop_timeout: float
    ) -> None:
        self.command = [sys.executable, "-m", module, *arguments]
        self.num_ranks = num_ranks
        self.log_folder = log_folder
        self.stop_timeout = stop_timeout
        self.signal_seen: int | None = None
        self.kill_at: float | None = None
        self.ranks: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            0, or 130 if Ctrl-C ended it, in an orderly way or not.

        Raises:
            TkError: the error of the rank that failed first, or WorkerDied naming a rank that was killed.
        """
        self.log_folder.mkdir(parents=True, exist_ok=True)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="tk-train-") as scratch:
                try:
                    self._start(Path(scratch))
                    failed = self._wait()
                finally:
                    self._kill()
                if failed is not None and not self._killed_on_request():
                    raise self._explain(failed, Path(scratch))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signal_seen == signal.SIGINT:
            return 130
        return 1 if self._killed_on_request() else 0

    def _start(self, scratch: Path) -> None:
        threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        for rank in range(self.num_ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.num_ranks),
                RENDEZVOUS_VARIABLE: f"file://{scratch / 'rendezvous'}",
                ERROR_FOLDER_VARIABLE: str(scratch),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            # A session of its own keeps the terminal's Ctrl-C from the ranks: it reaches them through us, once.
            if rank == 0:
                process = subprocess.Popen(self.command, env=environment, start_new_session=True)
            else:
                with (self.log_folder / f"rank-{rank}.log").open("wb") as log:
                    process = subprocess.Popen(
                        self.command, env=environment, start_new_session=True, stdout=log, stderr=log
                    )
            self.ranks.append(process)

    def _wait(self) -> int | None:
        """Waits for all ranks. Returns the first one that failed, once its peers had time to notice."""
        failed: int | None = None
        while any(rank.poll() is None for rank in self.ranks):
            if failed is None:
                failed = next((i for i, rank in enumerate(self.ranks) if rank.poll() not in (None, 0)), None)
                if failed is not None:
                    self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + GRACE_SECONDS)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._kill()
            time.sleep(POLL_SECONDS)
        return (
            next((i for i, rank in enumerate(self.ranks) if rank.returncode != 0), None) if failed is None else failed
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_seen is not None:
            self.kill_at = time.monotonic()
            return
        self.signal_seen = number
        self.kill_at = time.monotonic() + self.stop_timeout
        print("stopping: the running step ends and a checkpoint is saved (once more to quit at once)", file=sys.stderr)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)

    def _killed_on_request(self) -> bool:
        return self.signal_seen is not None and any(rank.returncode == -signal.SIGKILL for rank in self.ranks)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _explain(self, failed: int, scratch: Path) -> TkError:
        for rank in (failed, *range(self.num_ranks)):
            report = scratch / f"error-{rank}.json"
            if report.exists():
                return read_error(report)
        code = self.ranks[failed].returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        where = f"; its output is in {self.log_folder / f'rank-{failed}.log'}" if failed else ""
        return WorkerDied(f"Rank {failed} of {self.num_ranks} {how}{where}. Committed checkpoints are whole.")


def write_error(error: TkError, rank: int) -> None:
    """Leaves a rank's error for the launcher, if there is one."""
    folder = os.environ.get(ERROR_FOLDER_VARIABLE)
    if folder:
        path = Path(folder) / f"error-{rank}.json"
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps({"class": type(error).__name__, "message": str(error)}), encoding="utf-8")
        aside.rename(path)


def read_error(path: Path) -> TkError:
    """The error that a rank left, with its class."""
    data = json.loads(path.read_text(encoding="utf-8"))
    kind = getattr(errors, data["class"], TkError)
    error: TkError = kind(data["message"])
    return error
