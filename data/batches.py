"""A global batch, dealt over data-parallel ranks and micro-batches: the same rows for any of their numbers."""

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .row import IGNORED, Row


class RowSource(Protocol):
    """What a batch is made of; `PackedDataset` is one."""

    seq_len: int

    def row(self, index: int) -> Row:
        """Row `index`."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at once: all that a forward pass needs, on whichever stage.

    Attributes:
        inputs: int64 [micro_batch_size, seq_len].
        targets: int64 [micro_batch_size, seq_len]: the token after each input, `IGNORED` where it does not count.
        documents: lengths of the documents, row after row, together micro_batch_size x seq_len; () = a row is one text.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: tuple[int, ...] = ()

    @property
    def num_valid(self) -> int:
        """Targets that count."""
        return int(np.count_nonzero(self.targets != IGNORED))

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64 [micro_batch_size, seq_len]: of each input within its document, or within its row."""
        num_rows, seq_len = self.inputs.shape
        lengths = np.array(self.documents or (seq_len,) * num_rows)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions: NDArray[np.int64] = np.arange(num_rows * seq_len) - starts
        return positions.reshape(num_rows, seq_len)


def global_batch(
    dataset: RowSource, first: int, num_rows: int, dp_rank: int, dp: int, micro_batch_size: int
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


def _micro_batch(dataset: RowSource, indexes: range, end: int) -> MicroBatch:
    inputs = np.zeros((len(indexes), dataset.seq_len), np.int64)
    targets = np.full((len(indexes), dataset.seq_len), IGNORED, np.int64)
    rows = [dataset.row(index) for index in indexes if index < end]
    for place, row in enumerate(rows):
        inputs[place], targets[place] = row.inputs, row.targets
    documents = [row.documents or (dataset.seq_len,) for row in rows]
    documents += [(dataset.seq_len,)] * (len(indexes) - len(rows))
    apart = any(row.documents for row in rows)
    return MicroBatch(inputs, targets, tuple(chain.from_iterable(documents)) if apart else ())
