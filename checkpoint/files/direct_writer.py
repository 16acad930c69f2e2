"""Writes of large runs of bytes that bypass the page cache.

Through the cache each page written costs a copy, a fresh page and its later writeback: up to three seconds of processor
time per gigabyte in a virtual machine. A direct write takes almost none, and leaves the cache to readers.
"""

import errno
import mmap
from typing import Final

from ...core.integers import round_up
from . import storage

PAGE: Final = max(mmap.PAGESIZE, 4096)  # bytes; a direct write is aligned to it, in the file and in memory
SMALLEST: Final = 2**18  # bytes; a shorter direct write costs more in latency than it saves
LARGEST: Final = 2**22  # bytes of the buffer


class DirectWriter:
    """Writes files for one thread: whole pages go directly to the disk, the bytes before and after through the cache.

    Each page is written in one of the two ways, never in both, unless the disk refuses a direct write midway.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(mmap.mmap(-1, LARGEST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes all of `data` (1-D, bytes) at `offset`; durable after an fsync, like any write.

        Raises:
            OSError: the disk is full or fails.
        """
        first, last = round_up(offset, PAGE), (offset + len(data)) // PAGE * PAGE
        done = 0
        if last - first >= SMALLEST:
            done = first - offset
            storage.pwrite(fd, data[:done], offset)
            done += self._pages(fd, data[done : last - offset], first)
        storage.pwrite(fd, data[done:], offset + done)

    def _pages(self, fd: int, data: memoryview, offset: int) -> int:
        """Writes whole pages directly; returns the bytes written, 0 if the file system has no direct writes."""
        if not storage.set_direct(fd, True):
            return 0
        try:
            for start in range(0, len(data), LARGEST):
                run = data[start : start + LARGEST]
                self._buffer[: len(run)] = run
                storage.pwrite(fd, self._buffer[: len(run)], offset + start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the answer of a file system that needs a larger alignment
                raise
            return 0
        finally:
            storage.set_direct(fd, False)
        return len(data)
