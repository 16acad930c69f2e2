"""Messages between ranks of one host: a Unix socket between every two, read and written by the thread that computes.

gloo hands every message from thread to thread, which takes a small collective a millisecond where ranks share cores;
here it takes some 60 microseconds (docs/benchmarks/collectives.md). Messages between two ranks of a group are matched
by order: every rank posts the same exchanges in the same order, as with any collective.
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
_HELLO: Final = struct.Struct("<16sqq")  # the listener's secret, number of the link, rank in it
_HEADER: Final = struct.Struct("<QQ")  # of a message: its number, its bytes
_TIMEVAL: Final = struct.Struct("ll")
_BACKLOG: Final = 4096  # callers that are not answered yet
_PATIENCE: Final = 30.0  # seconds with a caller who does not say who it is
_WHY: Final = (
    "It ended, still computes, or makes fewer steps than this rank does: where numbers of batches are uneven, all "
    "ranks must stop at the smallest."
)


class LinkLost(RuntimeError):
    """A peer is gone, or said nothing for too long."""


def host_identity() -> bytes:
    """16 bytes that are the same for processes of one host, in the same container; nobody else's where the system does
    not tell."""
    try:
        names = [_BOOT.read_text().strip(), *(str(os.stat(path).st_ino) for path in _NAMESPACES)]
    except OSError:
        return secrets.token_bytes(16)
    return hashlib.sha256(" ".join(names).encode()).digest()[:16]


class Connection:
    """This end of the socket to one peer, with what is still to be sent and what is to be received, in order.

    Before each message goes a header, its number and its bytes: ranks that fell out of step notice.

    Attributes:
        name: what errors call the peer.
        expected: pieces to fill, and what headers must then hold.
        num_sent, num_received: messages so far.
    """

    def __init__(self, end: socket.socket, name: str, outbox: "Outbox") -> None:
        self.end, self.name, self.outbox = end, name, outbox
        self.unsent: deque[memoryview] = deque()
        self.expected: deque[tuple[memoryview, bytes]] = deque()
        self.num_posted = self.num_sent = self.num_expected = self.num_received = 0

    def send(self, message: memoryview) -> int:
        """Posts a message, which must not change until it is sent; returns its number."""
        self.num_posted += 1
        waiting = bool(self.unsent)
        self.unsent += (memoryview(_HEADER.pack(self.num_posted, len(message))), message)
        if not waiting:
            self.push()
        return self.num_posted

    def push(self) -> None:
        """Sends what the socket takes without waiting."""
        while self.unsent:
            try:
                count = self.end.send(self.unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self.outbox.add(self)
                return
            except OSError as error:
                raise LinkLost(f"{self.name} is gone: {error.strerror}. {_WHY}") from error
            if count < len(self.unsent[0]):
                self.unsent[0] = self.unsent[0][count:]
            else:
                self.unsent.popleft()
                self.num_sent += not len(self.unsent) % 2  # header and message are two pieces
        self.outbox.discard(self)

    def expect(self, message: memoryview) -> int:
        """Posts room for the next message; returns its number."""
        self.num_expected += 1
        header = _HEADER.pack(self.num_expected, len(message))
        self.expected += ((memoryview(bytearray(len(header))), header), (message, b""))
        return self.num_expected

    def pull(self, flags: int = socket.MSG_WAITALL) -> None:
        """Takes some of what is expected first; waits for it unless the flags say otherwise."""
        piece, header = self.expected[0]
        try:
            count = self.end.recv_into(piece, 0, flags)
        except BlockingIOError as error:
            raise LinkLost(
                f"{self.name} said nothing for {self.outbox.timeout:g} seconds; its message {self.num_received + 1} to "
                f"this rank is waited for. {_WHY}"
            ) from error
        except OSError as error:
            raise LinkLost(f"{self.name} is gone: {error.strerror}. {_WHY}") from error
        if count == 0:
            raise LinkLost(f"{self.name} is gone: it closed its connection. {_WHY}")
        if count < len(piece):
            self.expected[0] = (piece[count:], header)
            return
        self.expected.popleft()
        if not header:
            self.num_received += 1
        elif bytes(piece.obj) != header:
            number, size = _HEADER.unpack(piece.obj)
            raise ParallelError(
                f"{self.name} sent its message {number} of {size} bytes where the {_HEADER.unpack(header)[0]}th, of "
                f"{_HEADER.unpack(header)[1]}, was due: the ranks do not do the same."
            )


class Outbox(set[Connection]):
    """Connections whose sockets were full, of all links that one switchboard made.

    Args:
        timeout: seconds.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = timeout

    def move(self, wanted: Connection | None = None) -> None:
        """Sends or receives something: of these connections, whose peers may be waiting for us to read before they
        read, or from `wanted`."""
        poll = select.poll()
        connections = {connection.end.fileno(): connection for connection in (*self, *([wanted] if wanted else ()))}
        for descriptor, connection in connections.items():
            reads = select.POLLIN if connection.expected else 0
            poll.register(descriptor, reads | (select.POLLOUT if connection.unsent else 0))
        events = poll.poll(self.timeout * 1000)
        if not events:
            names = ", ".join(sorted(connection.name for connection in connections.values()))
            raise LinkLost(f"{names} said and took nothing for {self.timeout:g} seconds. {_WHY}")
        for descriptor, event in events:
            connection = connections[descriptor]
            if event & ~select.POLLOUT and connection.expected:
                connection.pull(socket.MSG_DONTWAIT)
            elif connection.unsent:
                connection.push()


class Exchange:
    """Messages that were posted together."""

    def __init__(
        self, sent: Sequence[tuple[Connection, int]], received: Sequence[tuple[Connection, int]], keep: object
    ) -> None:
        self._sent, self._received, self._keep = sent, received, keep

    def wait(self) -> None:
        """Returns once all have arrived, and what was sent may be written again.

        Raises:
            LinkLost: a peer is gone or too late.
        """
        for connection, number in self._received:
            while connection.num_received < number:
                if connection.outbox:
                    connection.outbox.move(connection)
                else:  # nobody waits for anything of ours that the system has not got: the quick way
                    connection.pull()
        for connection, number in self._sent:
            while connection.num_sent < number:
                connection.outbox.move()


class Link:
    """The connections of one group's ranks; closed when nobody holds it any more."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self.connections = connections
        weakref.finalize(self, _close, list(connections.values()))

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Exchange:
        """Posts contiguous tensors to and from peers, by rank in the group; they belong to it until waited for.

        Raises:
            LinkLost: a peer is gone.
        """
        received = [(self.connections[rank], _bytes(tensor)) for rank, tensor in receives.items()]
        sent = [(self.connections[rank], _bytes(tensor)) for rank, tensor in sends.items()]
        return Exchange(
            [(connection, connection.send(message)) for connection, message in sent if message],
            [(connection, connection.expect(message)) for connection, message in received if message],
            self,
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory. Not by `numpy()`: it forbids the storage ever to be resized, as ZeRO 3 does."""
    assert tensor.is_contiguous()
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # lives as long as any view of the memory
    return memoryview(memory)


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.outbox.discard(connection)
        connection.end.close()


class Switchboard:
    """Connects the ranks of groups; a context, entered by every rank of the default process group, which is gloo.

    Args:
        timeout: seconds after which a rank that waits for another gives up.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.outbox = Outbox(timeout)
        self._num_links = 0
        self._secret = secrets.token_bytes(16)
        self._waiting: dict[tuple[int, int], socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        name = secrets.token_bytes(16)
        self._listener.bind(_address(name))
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(timeout)
        mine = torch.frombuffer(bytearray(host_identity() + name + self._secret), dtype=torch.uint8)
        self._records = [bytes(record.numpy()) for record in self._gather(mine)]
        near = torch.tensor([self._reaches(rank) for rank in range(len(self._records))], dtype=torch.uint8)
        self._near = torch.stack(self._gather(near)).bool()  # [caller, called]

    @staticmethod
    def _gather(mine: torch.Tensor) -> list[torch.Tensor]:
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        return everybody

    def _reaches(self, rank: int) -> bool:
        """Whether a rank's listener is here: clones of one virtual machine are alike to the last identity."""
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
        for end in self._waiting.values():
            end.close()

    def link(self, ranks: Sequence[int]) -> Link | None:
        """Connects some ranks with each other; None if they are not all on one host, or this one is not among them.

        Every rank calls it for the same sets of ranks in the same order.

        Raises:
            LinkLost: a rank did not come.
        """
        self._num_links += 1
        if self.rank not in ranks or not self._near[list(ranks)][:, list(ranks)].all():
            return None
        mine = ranks.index(self.rank)
        ends = {place: self._call(ranks[place], mine) for place in range(mine)}
        ends |= {place: self._answer(place) for place in range(mine + 1, len(ranks))}
        return Link({place: Connection(end, f"Rank {ranks[place]}", self.outbox) for place, end in ends.items()})

    def _call(self, rank: int, mine: int) -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(_address(self._records[rank][16:32]))
            end.sendall(_HELLO.pack(self._records[rank][32:], self._num_links, mine))
        except OSError as error:
            end.close()
            raise LinkLost(f"Rank {rank} cannot be reached: {error.strerror}.") from error
        return self._ready(end)

    def _answer(self, place: int) -> socket.socket:
        wanted = (self._num_links, place)
        while wanted not in self._waiting:
            try:
                end, _ = self._listener.accept()
            except TimeoutError as error:
                raise LinkLost(f"Nobody connected for {self.timeout:g} seconds.") from error
            end.settimeout(min(self.timeout, _PATIENCE))
            try:
                hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
            except OSError:  # it says nothing, or is gone: none of ours
                hello = b""
            secret, number, caller = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
            if secrets.compare_digest(secret, self._secret):
                self._waiting[number, caller] = self._ready(end)
            else:
                end.close()
        return self._waiting.pop(wanted)

    def _ready(self, end: socket.socket) -> socket.socket:
        """Blocking for the timeout by the kernel's own clock, which costs no system call."""
        end.settimeout(None)
        seconds = int(self.timeout)
        end.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, int((self.timeout - seconds) * 1e6))
        )
        return end


def _address(name: bytes) -> bytes:
    """Linux's abstract namespace: no file, and gone with its socket."""
    return b"\0tk-" + name.hex().encode()
