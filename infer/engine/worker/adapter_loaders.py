"""The engine's side of the loaders of its workers: each order is carried out by all ranks, or by none."""

import itertools
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from ....core.errors import StorageError, TkError, WorkerDied
from ..step.channel import Frame, error_from, receive, send
from .adapter_order import AdapterOrder


@dataclass(frozen=True, slots=True)
class PackedOrder:
    """An adapter that all ranks have packed.

    Attributes:
        number: the number of its order.
        loaders: those that have packed it, which end with their workers.
    """

    number: int
    loaders: "AdapterLoaders"


class AdapterLoaders:
    """The loaders of one set of workers, for any thread; they carry out one order after another.

    Args:
        connections: the sockets to the loaders, in rank order.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()

    def pack(self, order: AdapterOrder, timeout: float) -> PackedOrder:
        """Lets every rank read and pack an adapter, and waits for all; steps go on meanwhile.

        Args:
            order: the adapter and its slot.
            timeout: the time to pack it, in seconds.

        Raises:
            TkError: a rank could not; then no rank keeps it.
            StorageError: a rank has not read and packed it in time, as above.
            WorkerDied: a rank has ended.
        """
        with self._turn:
            number, deadline = next(self._numbers), time.monotonic() + timeout
            try:
                self._send(Frame("adapter", {"number": number, "order": asdict(order)}))
                answers = [self._answer(each, number, order, deadline) for each in self._connections]
                for answer in answers:
                    if answer.op == "refused":
                        raise error_from(answer)
            except TkError:
                with suppress(WorkerDied):
                    self._send(Frame("forget", {"number": number}))
                raise
            return PackedOrder(number, self)

    def end(self) -> None:
        """Fails the order that is carried out, and later ones, with WorkerDied, and waits for nothing."""
        for connection in self._connections:
            with suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends as `end` does, and closes the sockets when no thread waits for them; a second call does nothing."""
        self.end()
        with self._turn:
            for connection in self._connections:
                connection.close()

    def _send(self, frame: Frame) -> None:
        for connection in self._connections:
            send(connection, frame)

    def _answer(self, connection: socket.socket, number: int, order: AdapterOrder, deadline: float) -> Frame:
        """Returns a rank's answer to an order; those to earlier ones, which came too late, are left out."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            frame = receive(connection)
            if frame is None:
                raise WorkerDied(f"The inference workers ended before {order.path} was loaded.")
            if frame.values["number"] == number:
                return frame
        raise StorageError(
            f"The inference workers have not read and packed {order.path} in time, so it is not loaded. Copy it to "
            "faster storage, or start with a larger start_timeout."
        )
