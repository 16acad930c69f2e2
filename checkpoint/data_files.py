"""Data files that are open for reading, few at a time."""

from typing import Final

from . import storage
from .reader import Checkpoint

MAX_OPEN: Final = 64


class DataFiles:
    """A checkpoint's data files, opened when first asked for; the oldest is closed where there are too many."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, int] = {}

    def __enter__(self) -> "DataFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            storage.close(fd)

    def open(self, name: str) -> int:
        """A descriptor; it may be closed when the next one is asked for.

        Raises:
            ShardCorrupt: the file's header is not the one that was written.
        """
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                storage.close(self._open.pop(next(iter(self._open))))
            self._open[name] = self._checkpoint.open_data(name)
        return self._open[name]
