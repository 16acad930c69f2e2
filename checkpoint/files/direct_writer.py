"""Large runs of bytes written past the page cache.

Through the cache each page written costs a copy, a fresh page and its later writeback: up to three seconds of processor
time a gigabyte in a virtual machine. A direct write takes next to none, and leaves the cache to those who read.
"""

import errno
import mmap
from typing import Final

from ...core.integers import round_up
from . import storage

PAGE: Final = max(mmap.PAGESIZE, 4096)  # where a direct write begins and ends, in the file and in memory
SMALLEST: Final = 2**18  # bytes from which a write of its own to the disk is worth its latency
LARGEST: Final = 2**22  # bytes of the buffer


class DirectWriter:
    """Writes files of one thread; whole pages go directly to the disk, what is before and after them through the cache.

    A page is written one way or the other, never both, unless a disk that refuses direct writes makes it so.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(mmap.mmap(-1, LARGEST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes all of `data`, flat and of bytes, at `offset`; durable after an fsync, as any write.

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
        """Writes whole pages directly; how many bytes, 0 where the file system has no direct writes."""
        if not storage.set_direct(fd, True):
            return 0
        try:
            for start in range(0, len(data), LARGEST):
                run = data[start : start + LARGEST]
                self._buffer[: len(run)] = run
                storage.pwrite(fd, self._buffer[: len(run)], offset + start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system answers that wants more than aligned pages
                raise
            return 0
        finally:
            storage.set_direct(fd, False)
        return len(data)
