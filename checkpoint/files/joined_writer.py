"""Short writes that follow each other in a file, joined: many small tensors take few calls to the system."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from .direct_writer import DirectWriter

LARGE: Final = 2**16  # bytes; such a write is not joined with others
MOST: Final = 2**20  # bytes that wait in memory for more, of all files


@dataclass(slots=True)
class _Waiting:
    """The bytes of one file that wait, and their place: [begin, end)."""

    begin: int
    end: int
    pieces: list[bytes] = field(default_factory=list)


class JoinedWriter:
    """Writes of one thread to several files, in any order of files; `flush` ends them.

    Args:
        disk: writes to an open file.
        open_file: returns the descriptor of a file by its name, valid until the next call.
    """

    def __init__(self, disk: DirectWriter, open_file: Callable[[str], int]) -> None:
        self._disk, self._open_file = disk, open_file
        self._runs: dict[str, _Waiting] = {}
        self._waiting = 0

    def put(self, file: str, data: memoryview, offset: int) -> None:
        """Writes all of `data` (1-D, bytes) at `offset`, now or with later bytes. Raises OSError as a write does."""
        run = self._runs.get(file)
        if run and (run.end != offset or len(data) >= LARGE):
            self._write(file)
            run = None
        if len(data) >= LARGE:
            self._disk.pwrite(self._open_file(file), data, offset)
            return
        if run is None:
            run = self._runs[file] = _Waiting(offset, offset)
        run.pieces.append(bytes(data))
        run.end += len(data)
        self._waiting += len(data)
        if self._waiting >= MOST:
            self.flush()

    def flush(self) -> None:
        """Writes all that waits."""
        for file in list(self._runs):
            self._write(file)

    def _write(self, file: str) -> None:
        run = self._runs.pop(file)
        self._waiting -= run.end - run.begin
        self._disk.pwrite(self._open_file(file), memoryview(b"".join(run.pieces)), run.begin)
