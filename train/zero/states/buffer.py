"""Memory that starts on a page, of exactly the size that is asked for; pinned, if a GPU reads and writes it."""

import mmap
import weakref

import torch

from ....core.errors import TkError
from ....parallel.streams import pin_in_place


class PageBuffer:
    """A run of bytes in the memory of the host.

    Args:
        nbytes: the number of bytes.
        pinned: whether the memory is registered with CUDA, so that copies from and to GPUs need not wait for it. The
            allocator of torch's `pin_memory` would take the next power of two.

    Attributes:
        memory: the bytes.
        values: the bytes as a tensor, uint8 [nbytes], for copies and views.
        close: takes the memory back from CUDA, once; so does the end of this object.
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.memory = memoryview(_map(max(nbytes, 1)))[:nbytes]
        self.values = torch.frombuffer(self.memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        code, unpin = pin_in_place(self.values) if pinned else (0, _nothing)
        if code:
            raise TkError(
                f"CUDA cannot pin {nbytes} bytes of this machine's memory for offload (error {code}). Raise the "
                "limit of locked memory (ulimit -l), or offload less ([offload])."
            )
        self.close = weakref.finalize(self, unpin)

    def view(self, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns `count` elements from byte `begin` on."""
        return self.values[begin : begin + count * dtype.itemsize].view(dtype)


def _map(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TkError(
            f"This machine gives no {nbytes} bytes of memory for offload: {error.strerror}. Offload less, or to disk "
            "([offload]), or raise the limit of this process (ulimit -v); tk plan shows the memory of the host."
        ) from error


def _nothing() -> None:
    """Takes back memory that is not pinned."""
