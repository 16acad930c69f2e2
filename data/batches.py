"""A global batch, split over data-parallel ranks and micro-batches: the same rows for any number of either."""

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.integers import round_up
from ..core.labels import IGNORED
from .row import Row


class RowSource(Protocol):
    """A source of the rows of a batch; `PackedDataset` is one.

    Attributes:
        seq_len: the number of inputs per row.
    """

    seq_len: int

    def row(self, index: int) -> Row:
        """Returns row `index` of the run."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows that one rank computes at once: the input of a forward pass, on any stage.

    Attributes:
        inputs: int64 [micro_batch_size, seq_len].
        targets: int64 [micro_batch_size, seq_len], the token after each input, or `IGNORED` if it does not count.
        documents: the lengths of the documents, row after row, micro_batch_size x seq_len in sum; () if every row is
            one text.
        first_row: the number of the first row in the run; the others follow it.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: tuple[int, ...] = ()
    first_row: int = 0

    @property
    def num_valid(self) -> int:
        """The number of targets that count."""
        return int(np.count_nonzero(self.targets != IGNORED))

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each input in its document, or in its row: int64 [micro_batch_size, seq_len]."""
        num_rows, seq_len = self.inputs.shape
        lengths = np.array(self.documents or (seq_len,) * num_rows)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions: NDArray[np.int64] = np.arange(num_rows * seq_len) - starts
        return positions.reshape(num_rows, seq_len)


def global_batch(
    dataset: RowSource, first: int, num_rows: int, dp_rank: int, dp: int, micro_batch_size: int
) -> list[MicroBatch]:
    """Returns the micro-batches of one data-parallel rank; every rank has the same number of them.

    The batch is cut into runs of dp x micro_batch_size rows, and each rank takes its micro_batch_size rows of every
    run. If the last run is short, fully masked rows fill it.

    Args:
        dataset: the source of rows.
        first: the index of the batch's first row.
        num_rows: the number of rows in the global batch.
        dp_rank: this rank's index among the data-parallel ranks.
        dp: the number of data-parallel ranks.
        micro_batch_size: rows per micro-batch and rank.
    """
    rows_at_once = dp * micro_batch_size
    return [
        _micro_batch(dataset, range(first + start, first + start + micro_batch_size), first + num_rows)
        for start in range(dp_rank * micro_batch_size, round_up(num_rows, rows_at_once), rows_at_once)
    ]


def _micro_batch(dataset: RowSource, indexes: range, end: int) -> MicroBatch:
    inputs = np.zeros((len(indexes), dataset.seq_len), np.int64)
    targets = np.full((len(indexes), dataset.seq_len), IGNORED, np.int64)
    rows = [dataset.row(index) for index in indexes if index < end]
    for place, row in enumerate(rows):
        inputs[place], targets[place] = row.inputs, row.targets
    documents = [row.documents or (dataset.seq_len,) for row in rows]
    documents += [(dataset.seq_len,)] * (len(indexes) - len(rows))
    separated = any(row.documents for row in rows)
    lengths = tuple(chain.from_iterable(documents)) if separated else ()
    return MicroBatch(inputs, targets, lengths, indexes.start)
