"""Data files that are open for reading or writing, a limited number at a time."""

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from . import storage

_MAX_OPEN: Final = 256


def max_open() -> int:
    """Returns how many files a copy keeps open for reading; it keeps as many open for writing.

    Each is at most a quarter of the process's limit: the rest is left to other code.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if limit == resource.RLIM_INFINITY else max(min(_MAX_OPEN, limit // 4), 1)


class DataFiles:
    """Files that open on first use; if too many are open, the least recently used one is closed."""

    def __init__(self, open_file: Callable[[str], int], close_file: Callable[[int], None] = storage.close) -> None:
        """Stores the two functions; opens no file.

        Args:
            open_file: opens a file by its name and returns a descriptor.
            close_file: closes a descriptor to make room for another.
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
        """Returns a descriptor, valid until the next call of `open`. Raises the errors of `open_file`."""
        fd = self._open.pop(name, None)
        if fd is None:
            if len(self._open) >= self._max_open:
                self._close_file(self._open.pop(next(iter(self._open))))
            fd = self._open_file(name)
        self._open[name] = fd
        return fd

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the files that are open now."""
        return list(self._open.values())


class NewFiles:
    """Files being written in a folder; each begins with its header, and is durable before it is closed.

    Args:
        headers: the first bytes of each file, by file name.
    """

    def __init__(self, folder: Path, headers: Mapping[str, bytes]) -> None:
        self._folder = folder
        self._not_created = dict(headers)
        self._files = DataFiles(self._open, _sync_and_close)

    def __enter__(self) -> "NewFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def open(self, name: str) -> int:
        """Returns a descriptor for writing, valid until the next call of `open`."""
        return self._files.open(name)

    def finish(self) -> None:
        """Makes all files durable, including those that hold a header only."""
        for name in list(self._not_created):
            self.open(name)
        for fd in self._files.descriptors:
            storage.fsync(fd)

    def _open(self, name: str) -> int:
        header = self._not_created.pop(name, None)
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
