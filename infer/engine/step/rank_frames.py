"""The frames of all ranks as the engine's thread gets them: awaited together, and each read in one call.

What this thread does between two steps takes a core from the kernels, and weights have driven its code out of the
caches: so it waits and reads by few calls.
"""

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from .channel import Frame, FrameReader


class RankFrames:
    """The frames that ranks send, beside the socket by which another thread wakes this one.

    Args:
        woken: that socket.
        beside: the frames of ranks that are idle meanwhile.
        look_beside: is called when these may have sent some.
    """

    def __init__(
        self,
        woken: socket.socket,
        beside: "RankFrames | None" = None,
        look_beside: Callable[[], object] = lambda: None,
    ) -> None:
        self._look_beside = look_beside
        self._epoll = select.epoll()
        self._epoll.register(woken, select.EPOLLIN)
        if beside is not None:  # it has a descriptor of its own, ready when one of its sockets is
            self._epoll.register(beside._epoll, select.EPOLLIN)
        self._ranks: dict[int, int] = {}  # by the descriptors of their sockets
        self._readers: list[FrameReader] = []
        self._read_ahead: list[int] = []  # ranks of which a whole frame was read with the one before it

    def add(self, connection: socket.socket, wait: Callable[[], object]) -> None:
        """Adds the socket of the next rank, which does not block; `wait` waits for more bytes of a frame that began.

        Raises:
            ValueError: it is closed.
        """
        self._epoll.register(connection, select.EPOLLIN)
        self._ranks[connection.fileno()] = len(self._readers)
        self._readers.append(FrameReader(connection, wait))

    def forget(self) -> None:
        """Forgets all ranks, before their sockets are closed."""
        for descriptor in self._ranks:
            with suppress(OSError):  # another thread has closed it
                self._epoll.unregister(descriptor)
        self._ranks, self._readers, self._read_ahead = {}, [], []

    def wait(self, seconds: float) -> tuple[Sequence[int], bool]:
        """Waits for frames, at most so long.

        Returns:
            The ranks that have sent some, and whether the thread is woken.
        """
        if self._read_ahead:
            return tuple(self._read_ahead), False
        ready = self._epoll.poll(seconds, len(self._ranks) + 2)
        ranks = [self._ranks[descriptor] for descriptor, _ in ready if descriptor in self._ranks]
        if len(ready) == len(ranks):
            return ranks, False
        self._look_beside()
        return ranks, True

    def receive(self, rank: int) -> Frame | None:
        """Returns the next frame of a rank; None if it has ended."""
        reader = self._readers[rank]
        frame = reader.receive()
        if self._read_ahead and rank in self._read_ahead:
            self._read_ahead.remove(rank)
        if reader.has_frame:
            self._read_ahead.append(rank)
        return frame

    def close(self) -> None:
        """Ends all waits for good; a second call does nothing."""
        self._epoll.close()
