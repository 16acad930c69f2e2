"""The memory of a process and of all processes that it starts, sampled while it runs."""

import threading
from pathlib import Path
from types import TracebackType

SAMPLE_SECONDS = 0.5


class PeakMemory:
    """A context that samples the proportional set size of a process tree.

    Attributes:
        peak_bytes: the largest sum of one sample; pages that processes share count once.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(_pss(pid) for pid in _tree(self._pid)))


def _tree(pid: int) -> list[int]:
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [pid, *(member for child in children for member in _tree(child))]


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
