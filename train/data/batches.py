"""A global batch, dealt over data-parallel ranks and micro-batches: the same rows for any of their numbers."""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

IGNORED: Final = -100  # the target of a position that does not count, as in torch's cross entropy


class Rows(Protocol):
    """What a batch is made of; `PackedDataset` is one."""

    seq_len: int

    def row(self, index: int) -> NDArray[np.int64]:
        """Row `index`: int64 [seq_len + 1]."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at once.

    Attributes:
        inputs: int64 [micro_batch_size, seq_len].
        targets: int64 [micro_batch_size, seq_len]: the token after each input, `IGNORED` in rows that only fill up.
        num_valid: targets that count.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    @property
    def num_valid(self) -> int:
        return int(np.count_nonzero(self.targets != IGNORED))


def global_batch(
    dataset: Rows, first: int, num_rows: int, dp_rank: int, dp: int, micro_batch_size: int
) -> list[MicroBatch]:
    """The micro-batches of one data-parallel rank, as many on every rank.

    The batch is `num_rows` rows from `first` on. Micro-batch m of all ranks together is the m-th piece of dp *
    micro_batch_size rows; where the last piece is short, rows that are masked as a whole fill it.
    """
    rows_at_once = dp * micro_batch_size
    return [
        _micro_batch(dataset, range(first + start, first + start + micro_batch_size), first + num_rows)
        for start in range(dp_rank * micro_batch_size, _ceil(num_rows, rows_at_once), rows_at_once)
    ]


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _micro_batch(dataset: Rows, indexes: range, end: int) -> MicroBatch:
    rows = np.zeros((len(indexes), dataset.seq_len + 1), np.int64)
    num_real = max(0, min(len(indexes), end - indexes.start))
    for place in range(num_real):
        rows[place] = dataset.row(indexes[place])
    targets = rows[:, 1:].copy()
    targets[num_real:] = IGNORED
    return MicroBatch(rows[:, :-1].copy(), targets)
