"""The phase that a rank is in, in a small file that others can read when it no longer answers. No torch.

A rank rewrites its file in place when it begins another phase: one system call, a few microseconds where the file is
local. The launcher, or under torchrun the rank that gives up first, reads all of them and says who holds up whom.
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
_RECORD: Final = struct.Struct(f"<qd?{_WIDTH}s")  # the fields of Beat but the rank; the phase in UTF-8


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's place in the run.

    Attributes:
        step: the optimizer step that it works on, 1-based; 0 before the first.
        phase: such as "forward" or "reduce".
        since: when the phase began, seconds since the epoch.
        gave_up: it waited there for others in vain, or lost them, and ends.
    """

    rank: int
    step: int
    phase: str
    since: float
    gave_up: bool = False

    @property
    def place(self) -> str:
        """In words: "at step 41 in forward"."""
        return f"at step {self.step} in {self.phase}" if self.step else f"still {self.phase}"


class Heartbeat:
    """The writing side: one rank's file in `folder`; without a folder it is silent.

    Args:
        interval: seconds between two writes at least, where the file system is shared by many hosts; 0 writes every
            phase. A phase that began sooner is written by a thread once they are over: a rank that is stuck is found in
            the phase that it is stuck in, and one that was killed in one that it was in up to `interval` before.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, interval: float = 0.0) -> None:
        self.interval = interval
        self._now = Beat(rank, 0, STARTING, time.time())
        self._file = -1
        self._lock = threading.Lock()  # of writing: the newest beat is written last
        self._may_write_at = 0.0
        self._is_late = threading.Event()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            self._write()
            if interval:
                threading.Thread(target=self._write_late, name="tk-heartbeat", daemon=True).start()

    def beat(self, phase: str, step: int | None = None) -> None:
        """Says that `phase` begins now; the step stays what it was if not given."""
        step = self._now.step if step is None else step
        self._now = Beat(self._now.rank, step, phase, time.time())
        if not self.interval or time.monotonic() >= self._may_write_at:
            self._write()
        else:
            self._is_late.set()

    def give_up(self) -> None:
        """Says, at once, that this rank ends because of others."""
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
        while self._is_late.wait():
            time.sleep(max(0.0, self._may_write_at - time.monotonic()))
            self._is_late.clear()
            self._write()


def read_beats(folder: Path, num_ranks: int) -> list[Beat]:
    """Where every rank was last heard of; a rank that has not written yet is `STARTING` since ever."""
    return [_read(_path(folder, rank), rank) for rank in range(num_ranks)]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}"


def _read(path: Path, rank: int) -> Beat:
    try:
        step, since, gave_up, phase = _RECORD.unpack(path.read_bytes())
    except (OSError, struct.error):  # not there, or not written to yet
        return Beat(rank, 0, STARTING, 0.0)
    return Beat(rank, step, phase.rstrip(b"\0").decode(errors="replace"), since, gave_up)
