"""The connections of links: each rank finds the ranks of its host, and connects the ranks of a group with each other.

A rank listens on an abstract Unix address, which only ranks can derive from its number, by a secret of their meeting. A
connection without the secret is closed, since every process on the host can see and reach the address.
"""

import errno
import hashlib
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from .local_link import BlockedConnections, Connection, Link, LinkLost
from .meeting import Meeting

_HELLO: Final = struct.Struct("<16sqq")  # the ranks' secret, the number of the link, the caller's rank in it
_TIMEVAL: Final = struct.Struct("ll")
_BACKLOG: Final = 4096  # connections that the kernel holds before they are accepted
_HELLO_TIMEOUT: Final = 30.0  # seconds that a connection has to send its hello


class LinkFactory:
    """Connects the ranks of groups; a context that every rank of the default process group, which is gloo, enters.

    The ranks leave it together. A rank that went ahead and ended, because it refuses a setting for example, would close
    connections that gloo still makes on another rank, and that rank would report a lost peer instead.

    Args:
        meeting: the meeting of all ranks.
        timeout: the seconds after which a rank that waits for another gives up.
    """

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        self.timeout = timeout
        self.rank = meeting.rank
        self.blocked = BlockedConnections(timeout)
        self._num_links = 0
        self._secret = meeting.secret
        self._accepted: dict[tuple[int, int], socket.socket] = {}  # by number of the link and the caller's rank in it
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address(self.rank))
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(timeout)
        host = meeting.host_ranks()  # of which all listen now
        mine = json.dumps([rank for rank in host if rank == self.rank or self._can_reach(rank)])
        # By rank of this host: the ranks that it can reach.
        self._reached = {rank: set(json.loads(line)) for rank, line in meeting.exchange(mine, host).items()}

    def _address(self, rank: int) -> bytes:
        """Returns a rank's address in Linux's abstract namespace, which has no file and disappears with its socket."""
        return b"\0tk-" + hashlib.sha256(self._secret + str(rank).encode()).hexdigest().encode()

    def _can_reach(self, rank: int) -> bool:
        """Returns whether a rank's listener accepts connections from this process.

        Equal host identities are not enough: clones of one virtual machine have the same.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(self._address(rank)) in (0, errno.EAGAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for end in self._accepted.values():
            end.close()
        if error is None:
            dist.barrier()

    def link(self, ranks: Sequence[int]) -> Link | None:
        """Connects some ranks with each other; every rank calls it in every round, with the set to which it belongs.

        Returns:
            The link, or None if the ranks are not all on one host or this rank is not among them.

        Raises:
            LinkLost: a rank could not be reached, or did not connect within the timeout.
        """
        self._num_links += 1
        if self.rank not in ranks or not all(self._reached.get(rank, set()).issuperset(ranks) for rank in ranks):
            return None
        mine = ranks.index(self.rank)
        ends = {place: self._connect(ranks[place], mine) for place in range(mine)}
        ends |= {place: self._accept(ranks, place) for place in range(mine + 1, len(ranks))}
        return Link({place: Connection(end, f"Rank {ranks[place]}", self.blocked) for place, end in ends.items()})

    def _connect(self, rank: int, mine: int) -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(self._address(rank))
            end.sendall(_HELLO.pack(self._secret, self._num_links, mine))
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
