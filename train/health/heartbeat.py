"""The heartbeat of a rank: a small file with its current phase, for other processes to read (no torch).

A rank rewrites its file in place when it begins another phase; on a local file system this takes one system call of a
few microseconds. The launcher, or under torchrun the rank that gives up first, reads the files of all ranks and finds
the ranks that hold up the job.
"""

import os
import struct
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

HEARTBEATS_VARIABLE: Final = "TK_HEARTBEATS"  # the folder of a job's heartbeats
STARTING: Final = "starting"
_WIDTH: Final = 96
_RECORD: Final = struct.Struct(f"<qd?{_WIDTH}s")  # the fields of Beat without the rank; the phase in UTF-8


@dataclass(frozen=True, slots=True)
class Beat:
    """The place of a rank in its run.

    Attributes:
        step: the current optimizer step, counted from 1; 0 before the first step.
        phase: the current phase, such as "forward" or "reduce".
        since: the begin of the phase, in seconds since the epoch.
        gave_up: whether the rank ends because it lost other ranks or waited for them in vain.
    """

    rank: int
    step: int
    phase: str
    since: float
    gave_up: bool = False

    @property
    def place(self) -> str:
        """The place as text, such as "at step 41 in forward"."""
        return f"at step {self.step} in {self.phase}" if self.step else f"still {self.phase}"


class Heartbeat:
    """The writer of one rank's heartbeat.

    Args:
        folder: the folder of the job's heartbeats; None writes nothing.
        interval: the least time in seconds between two writes, for a file system that many hosts share; 0 writes every
            phase. A phase that begins earlier is written by a thread once the time is over. So a stuck rank's file
            shows the phase in which it is stuck, and a killed rank's file a phase of its last `interval` seconds.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, interval: float = 0.0) -> None:
        self.interval = interval
        self._now = Beat(rank, 0, STARTING, time.time())
        self._file = -1
        self._lock = threading.Lock()  # held while writing, so that the newest beat is written last
        self._may_write_at = 0.0
        self._is_late = threading.Event()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            self._write()
            if interval:
                threading.Thread(target=self._write_late, name="tk-heartbeat", daemon=True).start()

    def beat(self, phase: str, step: int | None = None) -> None:
        """Records that `phase` begins now; `step` is the current step, None if it has not changed."""
        step = self._now.step if step is None else step
        self._now = Beat(self._now.rank, step, phase, time.time())
        if not self.interval or time.monotonic() >= self._may_write_at:
            self._write()
        else:
            self._is_late.set()

    def give_up(self) -> None:
        """Writes at once that this rank ends because of other ranks."""
        self._now = replace(self._now, since=time.time(), gave_up=True)
        self._write()

    def _write(self) -> None:
        if self._file < 0:
            return
        with self._lock:
            self._may_write_at = time.monotonic() + self.interval
            now = self._now
            os.pwrite(self._file, _RECORD.pack(now.step, now.since, now.gave_up, now.phase.encode()[:_WIDTH]), 0)

    def _write_late(self) -> None:
        """Runs on the thread: writes the newest beat when the interval allows it."""
        while self._is_late.wait():
            time.sleep(max(0.0, self._may_write_at - time.monotonic()))
            self._is_late.clear()
            self._write()


def read_beats(folder: Path, num_ranks: int) -> list[Beat]:
    """Returns the last beat of every rank; a rank without a file is `STARTING` since time 0."""
    return [_read(_path(folder, rank), rank) for rank in range(num_ranks)]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}"


def _read(path: Path, rank: int) -> Beat:
    try:
        step, since, gave_up, phase = _RECORD.unpack(path.read_bytes())
    except (OSError, struct.error):  # the file does not exist, or nothing is written yet
        return Beat(rank, 0, STARTING, 0.0)
    return Beat(rank, step, phase.rstrip(b"\0").decode(errors="replace"), since, gave_up)
