"""The memory, descriptors and threads that the processes of a server hold at a moment."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tk.benchmarks.serving.start import descendants, rolled_up

HEADING: Final = (
    "| reload | s | RSS, MiB | anonymous | others' PSS | descriptors | threads | processes |\n"
    "|---|---|---|---|---|---|---|---|"
)
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class ProcessFigures:
    """What the processes of a server hold at a moment: bytes, descriptors, threads.

    Attributes:
        seconds: the time since the load began.
        rss, anonymous: of the server's process.
        others: the bytes of its workers and other processes, shared ones divided (PSS).
        descriptors, threads: of the server's process.
        processes: the number of the other processes.
    """

    seconds: float
    rss: int
    anonymous: int
    others: int
    descriptors: int
    threads: int
    processes: int

    @staticmethod
    def of(pid: int, start: float) -> "ProcessFigures":
        """Reads the figures of a server."""
        others = [each for each in descendants(pid) if each != pid]
        pss = 0
        for each in others:
            with suppress(OSError, RuntimeError):  # it has ended
                pss += rolled_up(each, "Pss")
        held = [len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task")]
        rss, anonymous = (rolled_up(pid, name) for name in ("Rss", "Anonymous"))
        return ProcessFigures(time.monotonic() - start, rss, anonymous, pss, held[0], held[1], len(others))

    def row(self, name: str) -> str:
        """Formats the figures as a line of the table."""
        sizes = " | ".join(f"{size / _MIB:.1f}" for size in (self.rss, self.anonymous, self.others))
        return f"| {name} | {self.seconds:.0f} | {sizes} | {self.descriptors} | {self.threads} | {self.processes} |"
