"""Consecutive groups of rows of different lengths, as the tokens of the experts of a layer."""

from collections.abc import Sequence

import torch

from .streams import sent


class RowGroups:
    """Groups of rows that follow one another. Their lengths are read from the device only where they are needed.

    Args:
        ends_E: int32 [E], the end of each group, on the rows' device.
        counts: the number of rows of each group, if the host knows them.
    """

    def __init__(self, ends_E: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        self.ends_E = ends_E
        self._counts = None if counts is None else tuple(counts)

    @staticmethod
    def of(counts: Sequence[int], device: torch.device) -> "RowGroups":
        """Returns groups of lengths that the host knows."""
        return RowGroups(sent(torch.tensor(counts).cumsum(0).int(), device), counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each group; the first time the host may wait for the device."""
        if self._counts is None:
            self._counts = tuple(self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).tolist())
        return self._counts
