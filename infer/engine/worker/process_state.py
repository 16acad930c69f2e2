"""What the kernel says about a process: whether it runs, is stopped or waits, and the CPU time that it has had."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")  # per second of CPU time
_WORDS: Final = MappingProxyType(
    {
        "R": "running",
        "S": "sleeping",
        "D": "in disk wait",
        "T": "stopped",
        "t": "stopped by a debugger",
        "Z": "ended",
        "X": "ended",
        "?": "in an unknown state",
    }
)
_STOPPED: Final = "Tt"
_HANGING: Final = f"{_STOPPED}DZX?"
_LEAST_SHARE: Final = 0.1  # of a core, that a process has which computes


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process.

    Attributes:
        letter: the kernel's letter for it; "?" = not known.
        cpu_seconds: the CPU time of all its threads, in seconds.
    """

    letter: str = "?"
    cpu_seconds: float = 0.0

    @classmethod
    def of(cls, process_id: int) -> "ProcessState":
        """Returns the state of a process now; it is not known of one that is gone, and without /proc."""
        try:
            fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:
            return cls()
        letter, *numbers = fields.split()
        return cls(letter, (int(numbers[10]) + int(numbers[11])) / _TICKS)

    @property
    def words(self) -> str:
        """The state for a reader."""
        return _WORDS.get(self.letter, f"in state {self.letter}")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.letter in _STOPPED

    @property
    def hangs(self) -> bool:
        """Whether it cannot compute, for a reason outside of it."""
        return self.letter in _HANGING

    def has_computed(self, before: "ProcessState", seconds: float) -> bool:
        """Returns whether it computes, or waits for nothing but a core, given its state so many seconds before."""
        return self.letter == "R" or self.cpu_seconds - before.cpu_seconds >= _LEAST_SHARE * seconds


def describe_ranks(process_ids: tuple[int, ...]) -> str:
    """Returns the ranks with their process ids and states, for a reader."""
    return ", ".join(
        f"rank {rank} (process {process_id}, {ProcessState.of(process_id).words})"
        for rank, process_id in enumerate(process_ids)
    )
