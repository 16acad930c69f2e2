"""States in memory: of the device that trains, or of the host."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from .buffer import PageBuffer
from .pinned_copies import PinnedCopies
from .state_store import StateRange


class MemoryStates:
    """States as one tensor per slot and bucket; see `StateStore`.

    Args:
        dtypes: the dtype of each slot of each bucket.
        sizes: the elements of this rank's range of each bucket.
        device: the device of the tensors.
        pinned: whether a GPU copies from and to the tensors, which are then in the host's memory.
    """

    def __init__(
        self,
        dtypes: Sequence[Mapping[str, torch.dtype]],
        sizes: Sequence[int],
        device: torch.device,
        pinned: bool = False,
    ) -> None:
        self.dtypes, self.device, self._sizes = dtypes, device, sizes
        self._buffers: list[PageBuffer] = []
        self._copies = PinnedCopies()

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            if not pinned:
                return torch.zeros(size, dtype=dtype, device=device)
            self._buffers.append(PageBuffer(size * dtype.itemsize, pinned=True))  # new pages are 0
            return self._buffers[-1].view(0, size, dtype)

        self._tensors = [
            {slot: zeros(size, dtype) for slot, dtype in of_bucket.items()}
            for size, of_bucket in zip(sizes, dtypes, strict=True)
        ]

    def read(self, slot: str, bucket: int, begin: int, end: int) -> torch.Tensor:
        """Returns a view."""
        return self._tensors[bucket][slot][begin:end]

    def write(self, slot: str, bucket: int, begin: int, values: torch.Tensor) -> None:
        """Copies values to their place."""
        self._copies.copy(self._tensors[bucket][slot][begin : begin + values.numel()], values)

    def read_ahead(self, buckets: Sequence[int]) -> None:
        """Does nothing."""

    @contextmanager
    def changing(self, buckets: Sequence[int], *, fresh: bool = False) -> Iterator[Iterator[StateRange]]:
        """Gives the tensors themselves."""
        yield (StateRange(bucket, 0, self._sizes[bucket], self._tensors[bucket]) for bucket in buckets)

    @property
    def fd(self) -> int:
        """-1: there is no file."""
        return -1

    def pin(self) -> bool:
        """Returns False."""
        return False

    def unpin(self) -> None:
        """Does nothing."""

    def segments(self, slot: str, bucket: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns []."""
        return []

    def close(self) -> None:
        """Frees the tensors."""
        self._tensors.clear()
        while self._buffers:
            self._buffers.pop().close()
