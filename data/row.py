"""One row of training data: its inputs, its targets and the documents in it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Row:
    """One row of training data.

    Attributes:
        inputs: int64 [seq_len].
        targets: int64 [seq_len], the token after each input, or `IGNORED` (core/labels.py) if it does not count.
        documents: the lengths of the documents in the row, in order, seq_len in sum; attention and positions do not
            cross from one into another. Padding counts as a last document. () if the row is one text.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: tuple[int, ...] = ()
