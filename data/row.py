"""One row of training: what goes in, what should come out, and which of its positions see each other."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

IGNORED: Final = -100  # the target of a position that does not count, as in torch's cross entropy


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        inputs: int64 [seq_len].
        targets: int64 [seq_len]: the token after each input, `IGNORED` where it does not count.
        documents: lengths of the documents in the row, in order, together seq_len: attention and positions stay inside
            of each. What fills up a row is its last document. () = the row is one text.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: tuple[int, ...] = ()
