"""Buffers in the host's memory for values that come and go, each of the size that is asked for, and used again."""

from bisect import bisect_left, insort
from collections import deque
from typing import Final

from .buffer import PageBuffer

SLACK: Final = 8  # a buffer is used for values that leave at most 1/8 of it empty


class HostPool:
    """A pool of buffers.

    It never holds more bytes than were in use at one time: a free buffer is given up before one of another size is made
    beyond that. Steps of the same sizes make no buffers but their first ones.

    Args:
        pinned: whether a GPU copies from and to the buffers.

    Attributes:
        most: the most bytes that were in use at one time.
    """

    def __init__(self, pinned: bool) -> None:
        self.most = self._used = 0
        self._pinned = pinned
        self._free: list[PageBuffer] = []  # by size
        # Garbage collection gives buffers back at any moment, on any thread: `append` is the one thing that it does.
        self._returned: deque[PageBuffer] = deque()

    @property
    def in_use(self) -> int:
        """The bytes of buffers that are taken."""
        self._collect()
        return self._used

    @property
    def held(self) -> int:
        """The bytes of all buffers."""
        return self.in_use + sum(map(_size, self._free))

    def take(self, nbytes: int) -> PageBuffer:
        """Returns a buffer of at least `nbytes`, whose content is undefined."""
        self._collect()
        place = bisect_left(self._free, nbytes, key=_size)
        if place < len(self._free) and _size(self._free[place]) <= nbytes + nbytes // SLACK:
            return self._use(self._free.pop(place))
        spare = max(self.most, self._used + nbytes) - self._used - nbytes
        free = sum(map(_size, self._free))
        while free > spare:
            given_up = self._free.pop()
            free -= _size(given_up)
            given_up.close()
        return self._use(PageBuffer(nbytes, pinned=self._pinned))

    def give_back(self, buffer: PageBuffer) -> None:
        """Ends the use of a buffer; any thread may call it."""
        self._returned.append(buffer)

    def _use(self, buffer: PageBuffer) -> PageBuffer:
        self._used += _size(buffer)
        self.most = max(self.most, self._used)
        return buffer

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used -= _size(buffer)
            insort(self._free, buffer, key=_size)


def _size(buffer: PageBuffer) -> int:
    return buffer.memory.nbytes
