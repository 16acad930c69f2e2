"""The interface to the states of a rank: its range of each bucket, in the slots of that bucket."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StateRange:
    """Elements [begin, end) of this rank's range of a bucket, with their values in each slot, 1-D."""

    bucket: int
    begin: int
    end: int
    slots: Mapping[str, torch.Tensor]


class StateStore(Protocol):
    """A rank's values in the slots of each bucket, one range per bucket and slot, wherever they are; all 0 at first.

    Attributes:
        dtypes: the dtype of each slot of each bucket.
        device: the device on which `changing` gives values, and so the one that computes an update.
    """

    dtypes: Sequence[Mapping[str, torch.dtype]]
    device: torch.device

    def read(self, slot: str, bucket: int, begin: int, end: int) -> torch.Tensor:
        """Returns elements [begin, end) of this rank's range of a bucket, 1-D; the caller only reads them."""

    def write(self, slot: str, bucket: int, begin: int, values: torch.Tensor) -> None:
        """Writes values, 1-D of any dtype and device, from element `begin` of this rank's range of a bucket."""

    def read_ahead(self, buckets: Sequence[int]) -> None:
        """Starts to read what `changing` gives first for these buckets, as far as buffers hold it."""

    def changing(self, buckets: Sequence[int], *, fresh: bool = False) -> AbstractContextManager[Iterator[StateRange]]:
        """Gives all ranges of the buckets, in order, with values on `device`, and stores what is changed in them.

        The values of a range may be used until the next one is asked for. Each bucket's last range ends it.

        Args:
            buckets: the indices of buckets.
            fresh: whether the values given are undefined; the caller then writes all that it needs.
        """

    @property
    def fd(self) -> int:
        """The descriptor of the file that `segments` are in; -1 without a file."""

    def pin(self) -> bool:
        """Keeps the present bytes of all values in the file until `unpin`; returns False if nothing can."""

    def unpin(self) -> None:
        """Lets updates write to all places again. Idempotent."""

    def segments(self, slot: str, bucket: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns the places of elements [begin, end) in the file, (byte, number of bytes), while `pin` keeps them."""

    def close(self) -> None:
        """Gives memory and files back. Idempotent."""
