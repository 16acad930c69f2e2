"""The two ways to make rows from the documents of one source: cut one stream of tokens, or pack whole documents."""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.integers import ceil_div
from ..core.labels import IGNORED
from .packing import pack
from .row import Row
from .token_stream import TokenStream

Split = Literal["train", "eval"]
SPLITS: Final[tuple[Split, Split]] = ("train", "eval")


class StreamRows:
    """The tokens [start, stop), cut into rows of seq_len inputs that each overlap the next by one token.

    Every token is a target exactly once, except the first one and an incomplete row at the end. Attention treats a row
    as one text.
    """

    def __init__(self, tokens: TokenStream, seq_len: int, start: int, stop: int) -> None:
        self.tokens, self.seq_len, self.start = tokens, seq_len, start
        self.num_rows = max(0, (stop - start - 1) // seq_len)

    def read_row(self, number: int) -> Row:
        """Returns row `number` in the order of the file."""
        start = self.start + number * self.seq_len
        return Row(*_read(self.tokens, start, start + self.seq_len + 1))


class DocumentRows:
    """The documents in [start, stop), packed whole into rows.

    A document of n tokens takes n - 1 places, since its last token is only a target. A text that is too long for a row
    is split into as few pieces as possible, so that each token but the first is a target exactly once. A fine-tuning
    example that is too long is truncated, because an answer without its question would teach the wrong thing.
    Documents without a target are left out.

    Attributes:
        num_long: the number of documents that were split or truncated.
        num_empty: the number of documents that were left out because they have no token to learn.
        num_rows: the number of rows into which they are packed.
    """

    def __init__(self, tokens: TokenStream, seq_len: int, start: int, stop: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        edges = _edges(tokens.document_offsets, start, stop)
        starts, stops = edges[:-1], edges[1:]
        self.num_long = int(np.count_nonzero(stops - starts > seq_len + 1))
        if tokens.masked:
            stops = np.minimum(stops, starts + seq_len + 1)
            kept = _count_learned(tokens, starts, stops) > 0
        else:
            kept = stops - starts > 1
        self.num_empty = int(np.count_nonzero(~kept))
        self._starts, self._stops = _split(starts[kept], stops[kept], seq_len)
        self._packing = pack(self._stops - self._starts - 1, seq_len)
        self.num_rows = len(self._packing.ends)

    def note(self) -> str:
        """Returns a sentence on the documents that were split, truncated or left out; "" if all of them are whole."""
        if not self.num_long and not self.num_empty:
            return ""
        done = "truncated" if self.tokens.masked else "split"
        return (
            f"{self.tokens.path}: {self.num_long} documents are longer than seq_len = {self.seq_len} and {done}; "
            f"{self.num_empty} are left out because they have no token to learn"
        )

    def read_row(self, number: int) -> Row:
        """Returns row `number` in the order of the file; one more document, of zeros, fills the free places."""
        inputs, targets = np.zeros(self.seq_len, np.int64), np.full(self.seq_len, IGNORED, np.int64)
        lengths: list[int] = []
        end = 0
        for piece in self._packing.row(number).tolist():
            piece_inputs, piece_targets = _read(self.tokens, int(self._starts[piece]), int(self._stops[piece]))
            place = slice(end, end + len(piece_inputs))
            inputs[place], targets[place] = piece_inputs, piece_targets
            lengths.append(len(piece_inputs))
            end = place.stop
        return Row(inputs, targets, tuple(lengths) if end == self.seq_len else (*lengths, self.seq_len - end))


def split_range(tokens: TokenStream, split: Split, eval_fraction: float) -> tuple[int, int]:
    """Returns the range [start, stop) of a split's tokens.

    The eval split is the end of the source: `eval_fraction` of the tokens, or as little as half of that so that it
    begins with a document. If the documents are too long for that, one document is cut in two.
    """
    wanted = round(tokens.num_tokens * eval_fraction)
    boundary = tokens.num_tokens - wanted
    document = int(tokens.document_offsets[int(np.searchsorted(tokens.document_offsets, boundary))])
    if tokens.num_tokens - document >= wanted / 2:
        boundary = document
    return (0, boundary) if split == "train" else (boundary, tokens.num_tokens)


def _read(tokens: TokenStream, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns inputs and targets of the tokens [start, stop)."""
    ids = tokens.read(start, stop)
    targets = np.where(tokens.learned(start + 1, stop), ids[1:], IGNORED) if tokens.masked else ids[1:]
    return ids[:-1], targets


def _edges(offsets: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Returns `start`, the document offsets between `start` and `stop`, and `stop`."""
    inside = offsets[np.searchsorted(offsets, start, "right") : np.searchsorted(offsets, stop, "left")]
    return np.concatenate(([start], inside, [stop])).astype(np.int64)


def _count_learned(tokens: TokenStream, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number of targets to learn in each range [start, stop); a range's first token is no target."""
    before = np.concatenate(([0], np.cumsum(tokens.learned(int(starts[0]), int(stops[-1])), dtype=np.int64)))
    result: NDArray[np.int64] = before[stops - starts[0]] - before[np.minimum(starts + 1, stops) - starts[0]]
    return result


def _split(
    starts: NDArray[np.int64], stops: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Splits ranges into pieces of at most seq_len + 1 tokens; a piece begins with the last token of the one before."""
    counts = ceil_div(stops - starts - 1, seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = np.repeat(starts, counts) + number * seq_len
    return firsts, np.minimum(firsts + seq_len + 1, np.repeat(stops, counts))
