"""What a rank does now, in a small file that others can read when it no longer answers. No torch, no threads.

A rank rewrites its file in place whenever it begins another phase: one system call, a few microseconds. The launcher,
or under torchrun the rank that gives up first, reads all of them and says who holds up whom.
"""

import os
import struct
import time
from dataclasses import dataclass
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
    """The writing side: one rank's file in `folder`; without a folder it is silent."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.step = 0
        self.phase = STARTING
        self._file = -1
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            self._write()

    def beat(self, phase: str, step: int | None = None) -> None:
        """Says that `phase` begins now; the step stays what it was if not given."""
        self.phase = phase
        if step is not None:
            self.step = step
        self._write()

    def give_up(self) -> None:
        """Says that this rank ends because of others."""
        self._write(gave_up=True)

    def _write(self, gave_up: bool = False) -> None:
        if self._file >= 0:
            phase = self.phase.encode()[:_WIDTH]
            os.pwrite(self._file, _RECORD.pack(self.step, time.time(), gave_up, phase), 0)


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
