"""Memory of the host beside a pretended GPU: what CUDA has pinned, and copies that end only once they are awaited.

A copy that does not wait has no result before its stream is synchronized: until then memory of the host that it writes
holds bytes of ones (NaN), and memory that it reads must not change.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

_ALREADY_REGISTERED = 712


def _span(values: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of a tensor's elements and of the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return values.data_ptr(), values.data_ptr() + (last + 1) * values.element_size()


@dataclass(frozen=True)
class _Copy:
    """A copy under way.

    Attributes:
        host: the tensor on the host.
        values: what it holds once the copy has ended.
        writes: whether the copy writes it.
        source: the tensor of the GPU that it reads beside the stream that computes, which so must not change.
    """

    host: torch.Tensor
    values: torch.Tensor
    writes: bool
    source: torch.Tensor | None = None


@dataclass
class PretendedMemory:
    """CUDA's runtime and its one stream.

    Attributes:
        pinned: the size of each run of memory that was registered, by its address.
        num_synchronized: how often the stream was awaited.
        beside: whether copies are begun on a stream of their own.
    """

    pinned: dict[int, int] = field(default_factory=dict)
    num_synchronized: int = 0
    beside: bool = False
    _under_way: list[_Copy] = field(default_factory=list)
    _allocated: list[torch.Tensor] = field(default_factory=list)  # kept, so that no other tensor gets its memory
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Pins memory; returns 0, or the code of an error."""
        if any(address < begin + size and begin < address + nbytes for begin, size in self.pinned.items()):
            return _ALREADY_REGISTERED
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Takes memory back; returns 0."""
        del self.pinned[address]
        return 0

    def pinned_copy(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy in memory that torch has pinned."""
        return self.allocated(values.clone(memory_format=torch.contiguous_format))

    def allocated(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the host whose memory torch has pinned, and never uses again."""
        self._allocated.append(values)
        return values

    def is_pinned(self, values: torch.Tensor) -> bool:
        """Returns whether all of a tensor of the host is pinned."""
        low, high = _span(values)
        of_torch = {each.data_ptr(): each.nbytes for each in self._allocated}
        return any(begin <= low and high <= begin + size for begin, size in (*self.pinned.items(), *of_torch.items()))

    def start_read(self, host: torch.Tensor) -> None:
        """Begins a copy from a tensor of the host, which does not wait."""
        with self._lock:
            self._under_way.append(_Copy(host.detach(), host.detach().clone(), writes=False))

    def start_write(self, host: torch.Tensor, values: torch.Tensor) -> None:
        """Begins a copy to a tensor of the host, which does not wait."""
        with self._lock, torch.no_grad():
            host.detach().view(torch.uint8).fill_(0xFF)
            copied, source = values.detach().to(host.dtype, copy=True), values.detach() if self.beside else None
            self._under_way.append(_Copy(host.detach(), copied, writes=True, source=source))

    def synchronize(self) -> None:
        """Ends all copies."""
        with self._lock, _disable_current_modes(), torch.no_grad():
            self.num_synchronized += 1
            ended, self._under_way = self._under_way, []
            for copy in ended:  # all of them, before one that is wrong raises: other threads wait for theirs
                if copy.writes:
                    copy.host.copy_(copy.values)
            for copy in ended:
                if copy.writes:
                    assert copy.source is None or _same(copy.values, copy.source), "memory of the GPU changed meanwhile"
                else:
                    assert _same(copy.values, copy.host), "memory of the host changed while it was copied to the GPU"


def _same(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bytes."""
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (before, now)))


@dataclass(frozen=True)
class PretendedStream:
    """A stream, or an event on it, for which the host waits.

    Attributes:
        memory: the memory that its copies read and write.
        waited: records a wait.
    """

    memory: PretendedMemory
    waited: Callable[[str], None]

    def synchronize(self) -> None:
        """Ends all copies."""
        self.waited("synchronizes the stream")
        self.memory.synchronize()

    def wait_stream(self, other: "PretendedStream") -> None:
        """Does nothing: all that was begun on other streams has ended, but for copies to the host."""

    def record_event(self) -> "PretendedStream":
        """Returns an event."""
        return self

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context in which copies are begun on this stream, beside the one that computes."""
        self.memory.beside = True
        try:
            yield
        finally:
            self.memory.beside = False
