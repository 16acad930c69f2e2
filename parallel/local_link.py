"""Messages between ranks of one host over Unix sockets, which the computing thread itself reads and writes.

gloo passes every message between threads, so a small collective takes a millisecond if ranks share cores; over a link
it takes some 60 microseconds (docs/benchmarks/collectives.md). Messages between two ranks of a group are matched by
order: every rank posts the same exchanges in the same order, as with any collective.
"""

import ctypes
import errno
import hashlib
import os
import secrets
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
import torch.distributed as dist

from ..core.errors import ParallelError

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("/proc/self/ns/pid", "/proc/self/ns/net")
_HELLO: Final = struct.Struct("<16sqq")  # the listener's secret, the number of the link, the caller's rank in it
_HEADER: Final = struct.Struct("<QQ")  # the number of a message and its size in bytes
_TIMEVAL: Final = struct.Struct("ll")
_BACKLOG: Final = 4096  # connections that the kernel holds before they are accepted
_HELLO_TIMEOUT: Final = 30.0  # seconds that a connection has to send its hello
_CAUSES: Final = (
    "It ended, it still computes, or it runs fewer steps than this rank: if the ranks have different numbers of "
    "batches, all of them must stop at the smallest number."
)


class LinkLost(RuntimeError):
    """A peer closed its connection, or sent nothing within the timeout."""


def host_identity() -> bytes:
    """Returns 16 bytes that only the processes of one container on one host share.

    They are random, and so shared with no other process, if the system does not reveal its identity.
    """
    try:
        names = [_BOOT.read_text().strip(), *(str(os.stat(path).st_ino) for path in _NAMESPACES)]
    except OSError:
        return secrets.token_bytes(16)
    return hashlib.sha256(" ".join(names).encode()).digest()[:16]


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


class LinkFactory:
    """Connects the ranks of groups; a context that every rank of the default process group, which is gloo, enters.

    Args:
        timeout: the seconds after which a rank that waits for another gives up.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.blocked = BlockedConnections(timeout)
        self._num_links = 0
        self._secret = secrets.token_bytes(16)
        self._accepted: dict[tuple[int, int], socket.socket] = {}  # by number of the link and the caller's rank in it
        self._listener = socket.socket(socket.AF_UNIX)
        name = secrets.token_bytes(16)
        self._listener.bind(_address(name))
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(timeout)
        mine = torch.frombuffer(bytearray(host_identity() + name + self._secret), dtype=torch.uint8)
        self._records = [bytes(record.numpy()) for record in self._gather(mine)]
        reachable = torch.tensor([self._can_reach(rank) for rank in range(len(self._records))], dtype=torch.uint8)
        self._reachable = torch.stack(self._gather(reachable)).bool()  # [caller, called]

    @staticmethod
    def _gather(mine: torch.Tensor) -> list[torch.Tensor]:
        records = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(records, mine)
        return records

    def _can_reach(self, rank: int) -> bool:
        """Returns whether a rank's listener accepts connections from this process.

        Equal host identities are not enough: clones of one virtual machine have the same.
        """
        if self._records[rank][:16] != self._records[self.rank][:16]:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(_address(self._records[rank][16:32])) in (0, errno.EAGAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for end in self._accepted.values():
            end.close()

    def link(self, ranks: Sequence[int]) -> Link | None:
        """Connects some ranks with each other; every rank calls it for the same sets of ranks in the same order.

        Returns:
            The link, or None if the ranks are not all on one host or this rank is not among them.

        Raises:
            LinkLost: a rank could not be reached, or did not connect within the timeout.
        """
        self._num_links += 1
        if self.rank not in ranks or not self._reachable[list(ranks)][:, list(ranks)].all():
            return None
        mine = ranks.index(self.rank)
        ends = {place: self._connect(ranks[place], mine) for place in range(mine)}
        ends |= {place: self._accept(ranks, place) for place in range(mine + 1, len(ranks))}
        return Link({place: Connection(end, f"Rank {ranks[place]}", self.blocked) for place, end in ends.items()})

    def _connect(self, rank: int, mine: int) -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(_address(self._records[rank][16:32]))
            end.sendall(_HELLO.pack(self._records[rank][32:], self._num_links, mine))
        except OSError as error:
            end.close()
            raise LinkLost(f"Rank {rank} cannot be reached over its Unix socket: {error.strerror}.") from error
        return self._set_timeout(end)

    def _accept(self, ranks: Sequence[int], place: int) -> socket.socket:
        """Returns the connection from the rank at a place of `ranks`; those of other ranks and links are kept."""
        wanted = (self._num_links, place)
        while wanted not in self._accepted:
            try:
                end, _ = self._listener.accept()
            except TimeoutError as error:
                raise LinkLost(
                    f"Rank {ranks[place]} did not connect to rank {self.rank} within {self.timeout:g} seconds. It "
                    f"ended, or has not reached the set-up of the same process groups."
                ) from error
            end.settimeout(min(self.timeout, _HELLO_TIMEOUT))
            try:
                hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
            except OSError:  # a process that sends nothing, or closed the connection, is no rank of this run
                hello = b""
            secret, number, caller = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
            if secrets.compare_digest(secret, self._secret):
                self._accepted[number, caller] = self._set_timeout(end)
            else:
                end.close()
        return self._accepted.pop(wanted)

    def _set_timeout(self, end: socket.socket) -> socket.socket:
        """Makes a socket block until the kernel's own timeout; Python's would cost one more system call per read."""
        end.settimeout(None)
        seconds = int(self.timeout)
        end.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, int((self.timeout - seconds) * 1e6))
        )
        return end


def _address(name: bytes) -> bytes:
    """Returns an address in Linux's abstract namespace, which has no file and disappears with its socket."""
    return b"\0tk-" + name.hex().encode()
