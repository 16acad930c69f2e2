"""Messages between ranks of one host over Unix sockets, which the computing thread itself reads and writes.

gloo passes every message between threads, so a small collective takes a millisecond if ranks share cores; over a link
it takes some 60 microseconds (docs/benchmarks/collectives.md). Messages between two ranks of a group are matched by
order: every rank posts the same exchanges in the same order, as with any collective.
"""

import ctypes
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ..core.errors import ParallelError

_HEADER: Final = struct.Struct("<QQ")  # the number of a message and its size in bytes
_CAUSES: Final = (
    "It ended, it still computes, or it runs fewer steps than this rank: if the ranks have different numbers of "
    "batches, all of them must stop at the smallest number."
)


class LinkLost(RuntimeError):
    """A peer closed its connection, or sent nothing within the timeout."""


class Connection:
    """The socket to one peer, with the messages that are still to be sent and to be received, in order.

    A header with the message's number and size precedes each message, so that ranks out of step notice it.

    Attributes:
        end: the socket.
        name: the peer's name in errors.
        blocked: the connections of this process whose sockets are full.
        unsent: headers and messages to send, in turn; the first may be sent in part.
        expected: buffers to fill, each with the header that it must then hold (empty for a message).
        num_posted, num_sent: the numbers of messages that were posted, and that the socket has taken whole.
        num_expected, num_received: the numbers of messages that are expected, and that have arrived whole.
    """

    def __init__(self, end: socket.socket, name: str, blocked: "BlockedConnections") -> None:
        self.end, self.name, self.blocked = end, name, blocked
        self.unsent: deque[memoryview] = deque()
        self.expected: deque[tuple[memoryview, bytes]] = deque()
        self.num_posted = self.num_sent = self.num_expected = self.num_received = 0

    def send(self, message: memoryview) -> int:
        """Posts a message, whose memory must not change until it is sent; returns its number."""
        self.num_posted += 1
        waiting = bool(self.unsent)
        self.unsent += (memoryview(_HEADER.pack(self.num_posted, len(message))), message)
        if not waiting:
            self.flush()
        return self.num_posted

    def flush(self) -> None:
        """Sends as much as the socket takes without waiting.

        Raises:
            LinkLost: the peer closed its connection.
        """
        while self.unsent:
            try:
                count = self.end.send(self.unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self.blocked.add(self)
                return
            except OSError as error:
                raise LinkLost(f"{self.name} is gone: {error.strerror}. {_CAUSES}") from error
            if count < len(self.unsent[0]):
                self.unsent[0] = self.unsent[0][count:]
            else:
                self.unsent.popleft()
                self.num_sent += not len(self.unsent) % 2  # a header and its message are two entries
        self.blocked.discard(self)

    def expect(self, message: memoryview) -> int:
        """Posts the memory for the next message; returns the message's number."""
        self.num_expected += 1
        header = _HEADER.pack(self.num_expected, len(message))
        self.expected += ((memoryview(bytearray(len(header))), header), (message, b""))
        return self.num_expected

    def receive(self, flags: int = socket.MSG_WAITALL) -> None:
        """Receives into the first expected buffer; with the default flags it waits for all of it.

        Raises:
            LinkLost: the peer closed its connection, or sent nothing within the timeout.
            ParallelError: the peer sent another message than the expected one.
        """
        buffer, header = self.expected[0]
        try:
            count = self.end.recv_into(buffer, 0, flags)
        except BlockingIOError as error:
            raise LinkLost(
                f"{self.name} sent nothing for {self.blocked.timeout:g} seconds, while this rank waits for its message "
                f"{self.num_received + 1}. {_CAUSES}"
            ) from error
        except OSError as error:
            raise LinkLost(f"{self.name} is gone: {error.strerror}. {_CAUSES}") from error
        if count == 0:
            raise LinkLost(f"{self.name} is gone: it closed its connection. {_CAUSES}")
        if count < len(buffer):
            self.expected[0] = (buffer[count:], header)
            return
        self.expected.popleft()
        if not header:
            self.num_received += 1
        elif bytes(buffer.obj) != header:
            number, size = _HEADER.unpack(buffer.obj)
            due_number, due_size = _HEADER.unpack(header)
            raise ParallelError(
                f"{self.name} sent message {number} of {size} bytes, but this rank expected message {due_number} of "
                f"{due_size} bytes: the two ranks ran different operations, or the same ones in another order."
            )


class BlockedConnections(set[Connection]):
    """The connections of one process whose sockets are full, of all its links.

    Args:
        timeout: the seconds after which a wait for a peer fails.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = timeout

    def progress(self, wanted: Connection | None = None) -> None:
        """Waits until at least one connection can send or receive, and lets it.

        Blocked connections must receive too: their peers may be blocked until this rank reads.

        Args:
            wanted: one more connection, from which the caller waits for a message.

        Raises:
            LinkLost: a peer closed its connection, or none moved within the timeout.
        """
        poll = select.poll()
        connections = {connection.end.fileno(): connection for connection in (*self, *([wanted] if wanted else ()))}
        for descriptor, connection in connections.items():
            reads = select.POLLIN if connection.expected else 0
            poll.register(descriptor, reads | (select.POLLOUT if connection.unsent else 0))
        events = poll.poll(self.timeout * 1000)
        if not events:
            names = ", ".join(sorted(connection.name for connection in connections.values()))
            raise LinkLost(f"{names} sent and received nothing for {self.timeout:g} seconds. {_CAUSES}")
        for descriptor, event in events:
            connection = connections[descriptor]
            if event & ~select.POLLOUT and connection.expected:
                connection.receive(socket.MSG_DONTWAIT)
            elif connection.unsent:
                connection.flush()


class Exchange:
    """Messages that were posted together.

    Args:
        sent: the connections and the numbers of the messages to send.
        received: the connections and the numbers of the messages to receive.
        keep: the link, which must not be closed before the messages have arrived.
    """

    def __init__(
        self, sent: Sequence[tuple[Connection, int]], received: Sequence[tuple[Connection, int]], keep: object
    ) -> None:
        self._sent, self._received, self._keep = sent, received, keep

    def wait(self) -> None:
        """Returns once all messages have arrived and the memory of those sent may be written again.

        Raises:
            LinkLost: a peer closed its connection, or sent nothing within the timeout.
        """
        for connection, number in self._received:
            while connection.num_received < number:
                if connection.blocked:
                    connection.blocked.progress(connection)
                else:  # the kernel has taken everything that peers wait for: one blocking read is faster than poll
                    connection.receive()
        for connection, number in self._sent:
            while connection.num_sent < number:
                connection.blocked.progress()


class Link:
    """The connections of a rank to the other ranks of its group; garbage collection closes them."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self.connections = connections
        weakref.finalize(self, _close, list(connections.values()))

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Exchange:
        """Posts messages to and from peers; the tensors must be left alone until the exchange was waited for.

        Args:
            sends: contiguous tensors to send, by rank in the group.
            receives: contiguous tensors to fill, by rank in the group.

        Raises:
            LinkLost: a peer closed its connection.
        """
        received = [(self.connections[rank], _bytes(tensor)) for rank, tensor in receives.items()]
        sent = [(self.connections[rank], _bytes(tensor)) for rank, tensor in sends.items()]
        return Exchange(
            [(connection, connection.send(message)) for connection, message in sent if message],
            [(connection, connection.expect(message)) for connection, message in received if message],
            self,
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor.

    `tensor.numpy()` would forbid to resize the storage for good, and ZeRO 3 resizes storages.
    """
    assert tensor.is_contiguous()
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # lives as long as any view of the memory
    return memoryview(memory)


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.blocked.discard(connection)
        connection.end.close()
