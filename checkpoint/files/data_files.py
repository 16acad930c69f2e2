"""Data files that are open for reading or writing, few at a time."""

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from . import storage

_MOST: Final = 256


def max_open() -> int:
    """How many files a copy keeps open to read from, and how many to write to.

    A quarter each of what the process may have open: the rest is left to others.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if limit == resource.RLIM_INFINITY else max(min(_MOST, limit // 4), 1)


class DataFiles:
    """Files opened when first asked for; where there are too many, the one not asked for for longest is closed."""

    def __init__(self, open_file: Callable[[str], int], close_file: Callable[[int], None] = storage.close) -> None:
        """Opens nothing yet.

        Args:
            open_file: opens a file by its name.
            close_file: closes one before its time.
        """
        self._open_file, self._close_file = open_file, close_file
        self._open: dict[str, int] = {}
        self._max_open = max_open()

    def __enter__(self) -> "DataFiles":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            storage.close(self._open.popitem()[1])

    def open(self, name: str) -> int:
        """A descriptor; it may be closed when the next one is asked for. Raises what `open_file` does."""
        fd = self._open.pop(name, None)
        if fd is None:
            if len(self._open) >= self._max_open:
                self._close_file(self._open.pop(next(iter(self._open))))
            fd = self._open_file(name)
        self._open[name] = fd
        return fd

    @property
    def descriptors(self) -> list[int]:
        """Of the files that are open now."""
        return list(self._open.values())


class NewFiles:
    """Files being written in a folder; each begins with its header, and is durable before it is closed.

    Args:
        headers: by name.
    """

    def __init__(self, folder: Path, headers: Mapping[str, bytes]) -> None:
        self._folder = folder
        self._to_be_made = dict(headers)
        self._files = DataFiles(self._open, _sync_and_close)

    def __enter__(self) -> "NewFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def open(self, name: str) -> int:
        """A descriptor for writing; it may be closed when the next one is asked for."""
        return self._files.open(name)

    def finish(self) -> None:
        """Makes all files durable, those too that nothing was written to."""
        for name in list(self._to_be_made):
            self.open(name)
        for fd in self._files.descriptors:
            storage.fsync(fd)

    def _open(self, name: str) -> int:
        header = self._to_be_made.pop(name, None)
        if header is None:
            return storage.open_again(self._folder / name)
        fd = storage.open_new(self._folder / name)
        try:
            storage.pwrite(fd, memoryview(header), 0)
        except BaseException:
            storage.close(fd)
            raise
        return fd


def _sync_and_close(fd: int) -> None:
    with storage.closing(fd):
        storage.fsync(fd)
