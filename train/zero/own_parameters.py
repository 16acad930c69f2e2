"""A rank's own parameters of one bucket, in memory of the device or wherever [offload] parameters puts them."""

from typing import Protocol

import torch

from .states.pinned_copies import PinnedCopies
from .states.state_store import StateStore

SLOT = "parameter"


class OwnParameters(Protocol):
    """This rank's part of a bucket.

    Attributes:
        size: the number of elements.
    """

    size: int

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Returns elements [begin, end), 1-D; `write_back` stores changes in them."""

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Writes values from element `begin` on."""

    def write_back(self, begin: int, values: torch.Tensor) -> None:
        """Stores what was changed in the values that `read` returned for elements from `begin` on."""


class ResidentParameters:
    """Parameters in memory of the device; see `OwnParameters`.

    Args:
        values: the parameters, 1-D.
        copies: makes copies of values that come from the host.
    """

    def __init__(self, values: torch.Tensor, copies: PinnedCopies) -> None:
        self.values, self.size, self._copies = values, values.numel(), copies

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Returns a view."""
        return self.values[begin:end]

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Copies values to their place."""
        self._copies.copy(self.values[begin : begin + values.numel()], values)

    def write_back(self, begin: int, values: torch.Tensor) -> None:
        """Does nothing: the values are a view."""


class StoredParameters:
    """Parameters in a store; see `OwnParameters`.

    Args:
        store: the store, with slot `SLOT`.
        bucket: the index of the bucket.
        size: the number of elements.
    """

    def __init__(self, store: StateStore, bucket: int, size: int) -> None:
        self._store, self._bucket, self.size = store, bucket, size

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Reads from the store."""
        return self._store.read(SLOT, self._bucket, begin, end)

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Writes to the store."""
        self._store.write(SLOT, self._bucket, begin, values)

    def write_back(self, begin: int, values: torch.Tensor) -> None:
        """Writes to the store."""
        self._store.write(SLOT, self._bucket, begin, values)
