"""A file of states from which a save reads some slots, instead of a copy of them in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...core import dtypes
from ...core.casts import Array
from ...core.errors import StorageError
from ...core.ownership import Owned
from ..files import storage

Segment: TypeAlias = tuple[int, int]  # the first byte in the file, the number of bytes
Segments: TypeAlias = Mapping[Owned, Sequence[Segment]]


@dataclass(frozen=True, slots=True)
class StateSource:
    """A file whose bytes stay as they are while a save reads them.

    Attributes:
        fd: a descriptor of the file.
        slots: the slots whose items are in the file.
    """

    fd: int
    slots: tuple[str, ...]

    def read(self, segments: Sequence[Segment], dtype: dtypes.DType) -> Array:
        """Returns the elements of an item, 1-D, from its segments.

        Raises:
            StorageError: the disk fails.
        """
        values = np.empty(sum(nbytes for _, nbytes in segments) // dtype.itemsize, dtype.numpy)
        left = memoryview(values.data).cast("B")
        for offset, nbytes in segments:
            count = storage.pread(self.fd, left[:nbytes], offset, once=True)
            if count != nbytes:
                raise StorageError(f"A file of optimizer states ends at byte {offset + count}, before its states do.")
            left = left[nbytes:]
        return values
