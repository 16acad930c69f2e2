"""Starts local ranks, passes signals on to them, and tears all of them down together.

Under torchrun this is not used: there a rank is what torchrun started. No torch is imported here.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..core import errors
from ..core.errors import TkError, WorkerDied

ERROR_FOLDER_VARIABLE = "TK_ERROR_FOLDER"
RENDEZVOUS_VARIABLE = "TK_RENDEZVOUS"
LAUNCHER_VARIABLE = "TK_LAUNCHER"  # its process id
FORK = "--fork"  # a rank's argument
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
        self.command = [sys.executable, "-P", "-m", module, *arguments]  # -P: not what lies in the current folder
        self.num_ranks = num_ranks
        self.log_folder = log_folder
        self.stop_timeout = stop_timeout
        self.signal_seen: int | None = None
        self.at_once = False  # a second signal came
        self.kill_at = math.inf
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.failures: dict[int, int] = {}  # rank -> exit code of those that failed by themselves, first one first
        self.unstopped: list[int] = []  # ranks that had to be killed

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            0, 130 if Ctrl-C ended it, 1 if a second SIGTERM did.

        Raises:
            TkError: the error of the rank that failed first; WorkerDied naming a rank that was killed, or those that
                did not stop in time.
        """
        self.log_folder.mkdir(parents=True, exist_ok=True)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="tk-train-") as scratch:
                try:
                    self._start(Path(scratch))
                    self._wait()
                finally:
                    self._kill()
                if not self.at_once:
                    self._raise_failure(Path(scratch))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signal_seen == signal.SIGINT:
            return 130
        return 1 if self.at_once else 0

    def _start(self, scratch: Path) -> None:
        threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        for rank in range(self.num_ranks):
            if self.signal_seen is not None:
                return
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.num_ranks),
                RENDEZVOUS_VARIABLE: f"file://{scratch / 'rendezvous'}",
                ERROR_FOLDER_VARIABLE: str(scratch),
                LAUNCHER_VARIABLE: str(os.getpid()),
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

    def _wait(self) -> None:
        """Waits until all ranks have ended; once one has failed, its peers get a moment to report and are killed."""
        while any(rank.poll() is None for rank in self.ranks):
            had_failures = bool(self.failures)
            self._note_failures()
            if self.failures and not had_failures:
                self.kill_at = min(self.kill_at, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= self.kill_at:
                self.unstopped = [number for number, rank in enumerate(self.ranks) if rank.poll() is None]
                return
            time.sleep(POLL_SECONDS)
        self._note_failures()

    def _note_failures(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.poll() not in (None, 0):
                self.failures.setdefault(number, rank.returncode)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_seen is not None:
            self.at_once = True
            self.kill_at = time.monotonic()
            return
        self.signal_seen = number
        self.kill_at = min(self.kill_at, time.monotonic() + self.stop_timeout)
        print("stopping: the running step ends and a checkpoint is saved (once more to quit at once)", file=sys.stderr)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _raise_failure(self, scratch: Path) -> None:
        """Raises the cause of a failed job: an error that a rank understood, else a rank that was killed, else the
        first to fail. Ranks that our own signal ended before they could handle it have not failed."""
        reports = [read_report(path) for path in sorted(scratch.glob("error-*.json"))]
        understood = next((report for report in reports if report.is_understood), None)
        if understood:
            raise understood.error
        failed = {
            rank: code for rank, code in self.failures.items() if not (self.signal_seen and code == -signal.SIGTERM)
        }
        killed = {rank: code for rank, code in failed.items() if code < 0}
        if failed and not killed and reports:
            raise reports[0].error
        for rank, code in (killed or failed).items():
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise WorkerDied(
                f"Rank {rank} of {self.num_ranks} {how}; logs are in {self.log_folder}. Committed checkpoints are "
                "whole: the same command resumes from the newest."
            )
        if self.unstopped and not self.failures:
            raise WorkerDied(
                f"Ranks {', '.join(map(str, self.unstopped))} of {self.num_ranks} had not stopped after "
                f"{self.stop_timeout:g} seconds and were killed, so nothing since the last checkpoint was saved. "
                "[train] stop_timeout sets that time."
            )


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank said of its end; `is_understood`: a TkError, not the echo of a peer's end or a fault of ours."""

    error: TkError
    is_understood: bool


def write_error(error: Exception, rank: int) -> None:
    """Leaves a rank's error for the launcher, if there is one, and its traceback in the rank's output."""
    trace = "".join(traceback.format_exception(error))
    folder = os.environ.get(ERROR_FOLDER_VARIABLE)
    if folder is None or rank != 0:
        print(trace, file=sys.stderr)
    if folder is not None:
        path = Path(folder) / f"error-{rank}.json"
        aside = path.with_suffix(".tmp")
        report = {"rank": rank, "class": type(error).__name__, "message": str(error), "traceback": trace}
        aside.write_text(json.dumps(report), encoding="utf-8")
        aside.rename(path)


def read_report(path: Path) -> Report:
    """A rank's report; the error carries the rank's traceback as a note, which `--debug` shows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    kind = getattr(errors, data["class"], None)
    if isinstance(kind, type) and issubclass(kind, TkError):
        report = Report(kind(data["message"]), is_understood=True)
    else:
        report = Report(TkError(f"Rank {data['rank']}: {data['class']}: {data['message']}"), is_understood=False)
    report.error.add_note(data["traceback"])
    return report
