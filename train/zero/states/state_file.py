"""The file of a rank's states on disk: without a name, read and written by threads past the page cache."""

import errno
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from ....checkpoint.files import storage
from ....core.errors import StorageError
from ....core.state_pieces import PAGE
from .buffer import PageBuffer

CHUNK: Final = 2**22  # bytes of one read or write
THREADS: Final = 4


class StateFile:
    """A file that ends with this process.

    Args:
        folder: it gets no name there.
        nbytes: its size.

    Attributes:
        fd: a descriptor, through the page cache.

    Raises:
        StorageError: the folder cannot hold the file.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        self.fd = storage.open_unnamed(folder)
        self._fds = [self.fd]
        self._threads = ThreadPoolExecutor(THREADS, "tk-states")
        # Garbage is collected at any moment, on any thread, also while locks of `threading` are held, so what it calls
        # waits for nothing. The threads are idle then, as work keeps this object, and end with the pool.
        self._release = weakref.finalize(self, _close, self._fds)
        try:
            self.reserve(max(nbytes, PAGE))
            self._direct = self._open_direct()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Waits for reads and writes, ends the threads and gives the file's bytes back. Idempotent.

        The end of this object, which nothing in flight lives to see, gives the bytes back, too.
        """
        self._threads.shutdown()
        self._release()

    def reserve(self, nbytes: int) -> None:
        """Makes the file larger. Raises StorageError if the disk is too small."""
        storage.reserve(self.fd, nbytes)

    def _open_direct(self) -> int:
        """Returns a descriptor past the page cache, or the file's own if its file system has none."""
        direct = storage.open_direct(self.fd)
        if direct is None:
            return self.fd
        self._fds.append(direct)
        page = PageBuffer(PAGE)
        try:
            storage.pread(direct, page.memory, 0)
        except StorageError as error:
            if error.errno != errno.EINVAL:  # the answer of a file system that needs a larger alignment
                raise
            return self.fd
        return direct

    def read_pages(self, buffer: memoryview, offset: int) -> "list[Future[None]]":
        """Starts to read whole pages; returns what ends with them."""
        return self._start(self._read, buffer, offset)

    def write_pages(self, buffer: memoryview, offset: int) -> "list[Future[None]]":
        """Starts to write whole pages; the buffer must not change before what is returned has ended."""
        return self._start(self._write, buffer, offset)

    def _start(self, work: Callable[[memoryview, int], None], buffer: memoryview, offset: int) -> "list[Future[None]]":
        starts = range(0, len(buffer), CHUNK)
        return [self._threads.submit(work, buffer[start : start + CHUNK], offset + start) for start in starts]

    def _read(self, buffer: memoryview, offset: int) -> None:
        self._check_whole(storage.pread(self._direct, buffer, offset), buffer, offset)

    def _write(self, buffer: memoryview, offset: int) -> None:
        storage.pwrite(self._direct, buffer, offset)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Reads any bytes, by this thread."""
        self._check_whole(storage.pread(self.fd, buffer, offset, once=True), buffer, offset)

    def write(self, data: memoryview, offset: int) -> None:
        """Writes any bytes, by this thread."""
        storage.pwrite(self.fd, data, offset)

    def _check_whole(self, count: int, buffer: memoryview, offset: int) -> None:
        if count != len(buffer):
            raise StorageError(
                f"A file of optimizer states in {self.folder} ends at byte {offset + count}, and bytes up to "
                f"{offset + len(buffer)} were written there. The disk or the network file system is at fault: see the "
                "system's log.",
                errno.EIO,
            )


def _close(fds: list[int]) -> None:
    while fds:
        storage.close(fds.pop())
