"""States on disk: an update reads ahead of itself and writes behind, through a few buffers.

    pieces     0     1     2     3     4     5
    read    ||||| ||||| |||||       |||||
    update        ||||| ||||| |||||
    write               ||||| |||||

Reads and writes of an update go past the page cache. While a save still reads the states, an update writes into a
second area of the file, so that the save goes on with the states that it began with.
"""

import errno
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ....core.errors import StorageError
from ....core.state_pieces import StatePiece, cut
from .buffer import PageBuffer
from .pinned_copies import PinnedCopies
from .state_file import StateFile
from .state_store import StateRange

LEAST_BUFFERS: Final = 3  # one is read, one updated, one written


@dataclass(slots=True)
class _Loan:
    """A buffer with the piece that is read into it or written from it.

    Attributes:
        pending: the reads or writes that have not ended.
    """

    buffer: PageBuffer
    piece: StatePiece
    pending: "list[Future[None]]"

    def wait(self) -> None:
        """Waits for the reads or writes; raises the error of the first that failed, once all have ended."""
        pending, self.pending = self.pending, []
        errors = [error for each in pending if (error := each.exception()) is not None]
        if errors:
            raise errors[0]


class DiskStates:
    """States in a file; see `StateStore`.

    Args:
        dtypes: the dtype of each slot of each bucket.
        sizes: the elements of this rank's range of each bucket.
        folder: the folder of the file, which has no name there.
        num_buffers: the number of buffers, of 4 to 16 MiB each.
        pinned: whether a GPU copies from and to the buffers.

    Raises:
        StorageError: (any method) the disk is full or fails.
    """

    def __init__(
        self,
        dtypes: Sequence[Mapping[str, torch.dtype]],
        sizes: Sequence[int],
        folder: Path,
        num_buffers: int,
        pinned: bool,
    ) -> None:
        self.dtypes, self.device = dtypes, torch.device("cpu")
        itemsizes = [{slot: dtype.itemsize for slot, dtype in of_bucket.items()} for of_bucket in dtypes]
        self._pieces = cut(sizes, itemsizes)
        self._of_bucket: dict[int, list[StatePiece]] = {}
        for piece in self._pieces:
            self._of_bucket.setdefault(piece.bucket, []).append(piece)
        largest = max((piece.nbytes for piece in self._pieces), default=0)
        self._area = sum(piece.nbytes for piece in self._pieces)
        self._file = StateFile(folder, self._area)
        self._areas = [0] * len(self._pieces)  # the area that has the piece's values, 0 or 1
        self._copies = PinnedCopies()
        self._pinned: list[int] | None = None  # the areas that a save reads
        self._free = [PageBuffer(largest, pinned) for _ in range(max(num_buffers, LEAST_BUFFERS))]
        self._ahead: deque[_Loan] = deque()  # pieces whose reads are started, in the order of the next update
        self._behind: deque[_Loan] = deque()  # pieces whose writes are started

    def read(self, slot: str, bucket: int, begin: int, end: int) -> torch.Tensor:
        """Returns a copy."""
        parts = list(self._parts(bucket, begin, end))
        self._settle(piece for piece, _, _ in parts)
        values = torch.empty(end - begin, dtype=self.dtypes[bucket][slot])
        for piece, low, high in parts:
            part = values[low - begin : high - begin]
            self._file.read(_bytes_of(part), self._place(piece, slot, low))
        return values

    def write(self, slot: str, bucket: int, begin: int, values: torch.Tensor) -> None:
        """Writes values; what was read ahead is forgotten."""
        parts = list(self._parts(bucket, begin, begin + values.numel()))
        self._settle(piece for piece, _, _ in parts)
        self._drop_ahead()
        for piece, low, high in parts:
            # A copy: torch would not free the memory of parameters again once numpy has seen it.
            part = torch.empty(high - low, dtype=self.dtypes[bucket][slot])
            self._copies.copy(part, values[low - begin : high - begin])
            before = self._begin(piece)
            if self._take_area(piece):
                self._copy(piece, before)
            self._file.write(_bytes_of(part), self._place(piece, slot, low))

    def _copy(self, piece: StatePiece, before: int) -> None:
        """Copies all values of a piece from the byte where they were."""
        whole = torch.empty(piece.nbytes, dtype=torch.uint8)
        self._file.read(_bytes_of(whole), before)
        self._file.write(_bytes_of(whole), self._begin(piece))

    def _parts(self, bucket: int, begin: int, end: int) -> Iterator[tuple[StatePiece, int, int]]:
        """Yields the pieces that hold elements [begin, end) of a bucket's range, each with its part of them."""
        for piece in self._of_bucket.get(bucket, ()):
            low, high = max(begin, piece.begin), min(end, piece.end)
            if low < high:
                yield piece, low, high

    def _place(self, piece: StatePiece, slot: str, element: int) -> int:
        itemsize = self.dtypes[piece.bucket][slot].itemsize
        return self._begin(piece) + piece.slots[slot] + (element - piece.begin) * itemsize

    def _begin(self, piece: StatePiece) -> int:
        return piece.place + self._areas[piece.index] * self._area

    def _take_area(self, piece: StatePiece) -> bool:
        """Chooses the area for new values of a piece; returns whether it is another than that of the present ones."""
        is_pinned = self._pinned is not None and self._pinned[piece.index] == self._areas[piece.index]
        if is_pinned:
            self._areas[piece.index] = 1 - self._areas[piece.index]
        return is_pinned

    def read_ahead(self, buckets: Sequence[int]) -> None:
        """Fills the buffers that are free."""
        started = len(self._ahead)
        order = [piece for bucket in buckets for piece in self._of_bucket.get(bucket, ())]
        self._settle(order)
        for piece in order[started : started + len(self._free)]:
            self._start_read(piece, fresh=False)

    @contextmanager
    def changing(self, buckets: Sequence[int], *, fresh: bool = False) -> Iterator[Iterator[StateRange]]:
        """Gives pieces, whose values are in a buffer until the next one is asked for."""
        order = [piece for bucket in buckets for piece in self._of_bucket.get(bucket, ())]
        self._settle(order)
        if fresh or [loan.piece for loan in self._ahead] != order[: len(self._ahead)]:
            self._drop_ahead()
        try:
            yield self._change(order, fresh)
        finally:
            self._drop_ahead()

    def _change(self, order: Sequence[StatePiece], fresh: bool) -> Iterator[StateRange]:
        next_read = len(self._ahead)
        for number, piece in enumerate(order):
            while next_read < len(order) and (self._free or next_read == number):
                if not self._free:
                    self._end_write()
                self._start_read(order[next_read], fresh)
                next_read += 1
            loan = self._ahead.popleft()
            loan.wait()
            slots = {
                slot: loan.buffer.view(piece.slots[slot], piece.end - piece.begin, dtype)
                for slot, dtype in self.dtypes[piece.bucket].items()
            }
            yield StateRange(piece.bucket, piece.begin, piece.end, slots)
            self._take_area(piece)
            loan.pending = self._file.write_pages(loan.buffer.memory[: piece.nbytes], self._begin(piece))
            self._behind.append(loan)
            while self._behind and all(each.done() for each in self._behind[0].pending):
                self._end_write()

    def _start_read(self, piece: StatePiece, fresh: bool) -> None:
        buffer = self._free.pop()
        reads = [] if fresh else self._file.read_pages(buffer.memory[: piece.nbytes], self._begin(piece))
        self._ahead.append(_Loan(buffer, piece, reads))

    def _end_write(self) -> None:
        loan = self._behind.popleft()
        self._free.append(loan.buffer)
        loan.wait()

    def _settle(self, pieces: Iterable[StatePiece]) -> None:
        """Waits for writes of pieces that are under way."""
        wanted = {piece.index for piece in pieces}
        while any(loan.piece.index in wanted for loan in self._behind):
            self._end_write()

    def _drop_ahead(self) -> None:
        """Forgets what was read ahead, once its reads have ended; an error of theirs would come again."""
        while self._ahead:
            loan = self._ahead.popleft()
            for each in loan.pending:
                each.exception()
            self._free.append(loan.buffer)

    @property
    def fd(self) -> int:
        """The descriptor of the file."""
        return self._file.fd

    def pin(self) -> bool:
        """Keeps the present values; the first call makes the file twice as large, or returns False on a full disk."""
        self._settle(self._pieces)
        try:
            self._file.reserve(2 * self._area)
        except StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return False
        self._pinned = list(self._areas)
        return True

    def unpin(self) -> None:
        """Lets updates write everywhere again."""
        self._pinned = None

    def segments(self, slot: str, bucket: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns one segment for each piece."""
        itemsize = self.dtypes[bucket][slot].itemsize
        return [
            (self._place(piece, slot, low), (high - low) * itemsize)
            for piece, low, high in self._parts(bucket, begin, end)
        ]

    def close(self) -> None:
        """Gives the file back. Idempotent."""
        self._file.close()
        for buffer in (*self._free, *(loan.buffer for loan in (*self._ahead, *self._behind))):
            buffer.close()


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy().data)
