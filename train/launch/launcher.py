"""Starts local ranks, passes signals on to them, and ends all of them together (no torch).

Under torchrun it is not used: there torchrun starts the ranks.
"""

import logging
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType

from ...core.cores import usable_cores
from ...core.errors import WorkerDied
from ...core.process import start_module
from ..health.heartbeat import HEARTBEATS_VARIABLE
from ..health.stall_detector import StallDetector, describe_places, name_flight_records, name_ranks
from .rank_report import ERROR_FOLDER_VARIABLE, read_reports

_log = logging.getLogger(__name__)

RENDEZVOUS_VARIABLE = "TK_RENDEZVOUS"
FORK, EVENTS = "--fork", "--json"  # arguments of a rank; the second prints the run's events on standard output
POLL_SECONDS = 0.05
_OF_MEMORY = (
    " If no person killed it, the system did, for want of memory (see dmesg); `tk plan` shows what a rank needs."
)
GRACE_SECONDS = 5.0  # the time in which other ranks report an error after one has failed


class Launcher:
    """One job of `num_ranks` local processes running `python -m MODULE ARGS`.

    Args:
        module: the module of a rank, such as "tk.train.launch.rank".
        arguments: the arguments of every rank.
        log_folder: the folder for rank-N.log, the output of every rank but 0. Rank 0 shares this process's output.
        stop_timeout: the time in seconds from the first signal until ranks are killed.
        stall_timeout: the longest time in seconds that a rank may stay in one phase.
        environment: variables of every rank, beside this process's own.

    Attributes:
        quit_at_once: whether a second signal came.
        kill_at: the monotonic time at which ranks are killed.
        failures: the exit code of each rank that failed by itself, the first one first.
        unstopped: the ranks that had to be killed.
        stalled: those of them that made no progress.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        num_ranks: int,
        log_folder: Path,
        stop_timeout: float,
        stall_timeout: float,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.environment = environment
        self.module = module
        self.arguments = arguments
        self.num_ranks = num_ranks
        self.log_folder = log_folder
        self.stop_timeout = stop_timeout
        self.stall_timeout = stall_timeout
        self.grace = min(GRACE_SECONDS, stall_timeout)
        self.signal_seen: int | None = None
        self.quit_at_once = False
        self.kill_at = math.inf
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.failures: dict[int, int] = {}
        self.unstopped: list[int] = []
        self.stalled: list[int] = []

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            0, 130 if Ctrl-C ended it, 1 if a second SIGTERM did.

        Raises:
            TkError: the error that caused the failure. It is a WorkerDied if a rank was killed, made no progress or
                did not stop in time; the message names the rank.
        """
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="tk-train-") as scratch:
                # Ranks that wait for a stuck rank give up after stall_timeout. The detector waits a little longer, so
                # that the rank that is left is the stuck one.
                detector = StallDetector(Path(scratch), self.num_ranks, self.stall_timeout + self.grace)
                try:
                    self._start(Path(scratch))
                    self._wait(detector)
                finally:
                    self._kill()
                if not self.quit_at_once:
                    self._raise_failure(Path(scratch), detector)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signal_seen == signal.SIGINT:
            return 130
        return 1 if self.quit_at_once else 0

    def _start(self, scratch: Path) -> None:
        threads = max(1, usable_cores() // self.num_ranks)
        for rank in range(self.num_ranks):
            if self.signal_seen is not None:
                return
            environment = {
                **self.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.num_ranks),
                RENDEZVOUS_VARIABLE: f"file://{scratch / 'rendezvous'}",
                ERROR_FOLDER_VARIABLE: str(scratch),
                HEARTBEATS_VARIABLE: str(scratch),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            }
            if rank == 0:
                self.ranks.append(start_module(self.module, self.arguments, environment=environment))
                _log.debug("rank 0 is process %d", self.ranks[0].pid)
                continue
            with (self.log_folder / f"rank-{rank}.log").open("wb") as log:
                self.ranks.append(
                    start_module(self.module, self.arguments, environment=environment, stdout=log, stderr=log)
                )
            _log.debug("rank %d is process %d, and writes to %s", rank, self.ranks[rank].pid, log.name)

    def _wait(self, detector: StallDetector) -> None:
        """Waits until all ranks have ended.

        Once a rank has failed, the others have `grace` seconds to report their errors. Ranks that still run after that
        time, or when a rank makes no progress, are recorded in `unstopped`; `run` kills them.
        """
        while any(rank.poll() is None for rank in self.ranks):
            had_failures = bool(self.failures)
            self._note_failures()
            if self.failures and not had_failures:
                self.kill_at = min(self.kill_at, time.monotonic() + self.grace)
            running = [number for number, rank in enumerate(self.ranks) if rank.poll() is None]
            self.stalled = [rank for rank in detector.look() if rank in running]
            if self.stalled or time.monotonic() >= self.kill_at:
                self.unstopped = running
                return
            time.sleep(POLL_SECONDS)
        self._note_failures()

    def _note_failures(self) -> None:
        """Records the ranks that have failed since the last call."""
        for number, rank in enumerate(self.ranks):
            if rank.poll() not in (None, 0):
                self.failures.setdefault(number, rank.returncode)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_seen is not None:
            self.quit_at_once = True
            self.kill_at = time.monotonic()
            return
        self.signal_seen = number
        self.kill_at = min(self.kill_at, time.monotonic() + self.stop_timeout)
        _log.info("stopping after the current step and a checkpoint (signal again to quit at once)")
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _raise_failure(self, scratch: Path, detector: StallDetector) -> None:
        """Raises the most likely cause of a failed job, if it failed.

        The first of these counts: a known error of a rank, a rank that was killed, an unexpected error, ranks without
        progress, any other error, an exit code, ranks that did not stop in time. All other reports are consequences.
        """
        detector.look()
        reports = read_reports(scratch)
        for kind in ("known", "unexpected"):
            error = next((report.error for report in reports if report.kind == kind), None)
            if error and not (kind == "unexpected" and self._killed()):
                raise error
        if killed := self._killed():
            rank, name = next(iter(killed.items()))
            text = f"Rank {rank} of {self.num_ranks} was killed by {name}: {self._places(detector, killed)}"
            raise WorkerDied(text + (_OF_MEMORY if name == "SIGKILL" else ""))
        peers_lost = any(report.kind == "peers lost" for report in reports)
        if stuck := (self.unstopped if peers_lost else self.stalled):
            raise WorkerDied(f"{self._no_progress(detector, stuck)}: {self._places(detector, stuck)}")
        if reports:
            raise reports[0].error
        for rank, code in self._failed().items():
            raise WorkerDied(
                f"Rank {rank} of {self.num_ranks} exited with code {code}: " + self._places(detector, [rank])
            )
        if self.unstopped and not self.failures:
            raise WorkerDied(
                f"Ranks {', '.join(map(str, self.unstopped))} of {self.num_ranks} did not stop within "
                f"{self.stop_timeout:g} seconds ([train] stop_timeout) and were killed. The steps since the last "
                "checkpoint are lost."
            )

    def _no_progress(self, detector: StallDetector, stuck: Collection[int]) -> str:
        """Returns the beginning of the message about ranks that held up the job.

        Other ranks may lose one long before the limit: a rank that failed closes its connections, and then its report
        may wait for a disk.
        """
        seconds = detector.seconds_in_place(stuck)
        if seconds >= self.stall_timeout:
            return f"No progress for {self.stall_timeout:g} seconds ([parallel] timeout_seconds)"
        return (
            f"Other ranks lost {name_ranks(stuck)} of {self.num_ranks}, with no progress for {seconds:.0f} "
            f"seconds and no report of an error in {self.grace:g} seconds after that"
        )

    def _failed(self) -> dict[int, int]:
        """Returns the exit code of each rank that failed, except those that the launcher's own signal ended."""
        return {
            rank: code for rank, code in self.failures.items() if not (self.signal_seen and code == -signal.SIGTERM)
        }

    def _killed(self) -> dict[int, str]:
        """Returns for each rank that another process killed the name of the signal.

        SIGABRT does not count if ranks were stuck: NCCL aborts a rank that waits for a stuck one.
        """
        names = {rank: signal.Signals(-code).name for rank, code in self._failed().items() if code < 0}
        return {rank: name for rank, name in names.items() if not (name == "SIGABRT" and self.unstopped)}

    def _places(self, detector: StallDetector, culprits: Collection[int]) -> str:
        """Returns the end of a message: the places of all ranks, the logs, and the way to go on."""
        return (
            f"{describe_places(detector.beats, culprits)}. Logs are in {self.log_folder}."
            f"{name_flight_records(self.log_folder, self.started)} Committed checkpoints are intact: the same command "
            "resumes from the newest."
        )
