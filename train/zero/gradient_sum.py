"""The sum of a step's gradients of one bucket, with the gradients or wherever [offload] gradients puts it."""

from collections.abc import Iterator
from typing import Protocol

import torch

from .states.pinned_copies import PinnedCopies
from .states.state_store import StateRange, StateStore

SLOT = "gradient"


class GradientSum(Protocol):
    """The reduced gradients of the elements that this rank updates, fp32."""

    def clear(self) -> None:
        """Makes the sum 0."""

    def add(self, part: torch.Tensor) -> None:
        """Adds reduced gradients of all own elements, fp32 [size / N]."""

    def put(self, part: torch.Tensor) -> None:
        """Replaces the sum."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Returns own elements [begin, end), only to be read, on the device or the host."""

    def stash(self, grads: torch.Tensor) -> None:
        """Keeps what this rank summed of the whole bucket, fp32 [size], until `unstash`."""

    def unstash(self) -> torch.Tensor | None:
        """Returns what was kept; None if nothing was since `clear`."""


class ResidentSum:
    """A sum in memory of the device; see `GradientSum`.

    Args:
        values: the sum, fp32 [size / N].
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def clear(self) -> None:
        """Makes the sum 0."""
        self.values.zero_()

    def add(self, part: torch.Tensor) -> None:
        """Adds in place."""
        self.values.add_(part)

    def put(self, part: torch.Tensor) -> None:
        """Replaces the sum in place."""
        self.values.copy_(part)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Returns a view."""
        return self.values[begin:end]

    def stash(self, grads: torch.Tensor) -> None:
        """Does nothing: gradients stay in the bucket between backward passes."""

    def unstash(self) -> torch.Tensor | None:
        """Returns None."""
        return None


class StoredSum:
    """A sum in a store; see `GradientSum`. Additions have the order that they have in memory, and so the bits.

    Args:
        store: the store, with slot `SLOT`.
        bucket: the index of the bucket.
        own: the elements of the bucket that this rank updates, if the store has the whole bucket; else all that it has.
        device: the device that trains.
        copies: makes the copies between the device and the host.
    """

    def __init__(self, store: StateStore, bucket: int, own: slice, device: torch.device, copies: PinnedCopies) -> None:
        self._store, self._bucket, self._own, self._device, self._copies = store, bucket, own, device, copies
        self._is_zero, self._stashed = True, 0

    def clear(self) -> None:
        """Notes that the sum is 0."""
        self._is_zero, self._stashed = True, 0

    def add(self, part: torch.Tensor) -> None:
        """Adds piece by piece."""
        if self._is_zero:
            self.put(part)
            return
        with self._store.changing([self._bucket]) as ranges:
            for each, low, high in self._owned(ranges):
                values = part[low - self._own.start : high - self._own.start]
                for begin, added in self._copies.parts_on_host(values):
                    first = low - each.begin + begin
                    each.slots[SLOT][first : first + added.numel()].add_(added)

    def put(self, part: torch.Tensor) -> None:
        """Writes the own elements; the others are not needed then."""
        self._is_zero = False
        with self._store.changing([self._bucket], fresh=True) as ranges:
            for each, low, high in self._owned(ranges):
                values = part[low - self._own.start : high - self._own.start]
                each.slots[SLOT][low - each.begin : high - each.begin].copy_(values)

    def _owned(self, ranges: Iterator[StateRange]) -> Iterator[tuple[StateRange, int, int]]:
        """Yields ranges with own elements, [low, high) of the bucket."""
        for each in ranges:
            low, high = max(each.begin, self._own.start), min(each.end, self._own.stop)
            if low < high:
                yield each, low, high

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Reads from the store."""
        if self._is_zero:
            return torch.zeros(end - begin, dtype=torch.float32, device=self._store.device)
        return self._store.read(SLOT, self._bucket, self._own.start + begin, self._own.start + end)

    def stash(self, grads: torch.Tensor) -> None:
        """Writes all elements."""
        self._stashed = grads.numel()
        with self._store.changing([self._bucket], fresh=True) as ranges:
            for each in ranges:
                each.slots[SLOT].copy_(grads[each.begin : each.end])

    def unstash(self) -> torch.Tensor | None:
        """Reads all elements to the device."""
        if not self._stashed:
            return None
        kept = torch.empty(self._stashed, dtype=torch.float32, device=self._device)
        self._copies.copy(kept, self._store.read(SLOT, self._bucket, 0, self._stashed))
        return kept
