"""The tiles of causal attention that a context-parallel rank computes, from plain numbers (no torch).

A query sees the keys of its document up to its own position, or the last ones of them in a window. So the pairs of a
run of queries are a triangle on the diagonal, a rectangle of keys before it, and with a window a second triangle, the
mirror image of the first, before that. No tile needs a mask, and each pair is in one tile.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .dealing import Dealing

Shape = Literal["diagonal", "rectangle", "edge"]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Queries with the keys that they see.

    Attributes:
        queries: indexes among the rank's own positions.
        keys: the positions of the keys.
        shape: "diagonal": query i of the tile sees its keys up to number i, and every query of the rank is in one
            such tile; "rectangle": all queries see all keys; "edge": query i sees the keys from number i on.
    """

    queries: range
    keys: range
    shape: Shape

    @property
    def num_pairs(self) -> int:
        """The number of query-key pairs."""
        pairs = len(self.queries) * len(self.keys)
        return pairs if self.shape == "rectangle" else (pairs + len(self.queries)) // 2


def tiles(dealing: Dealing, rank: int, window: int | None) -> tuple[AttentionTile, ...]:
    """Returns the tiles of a rank's queries, ordered so that each begins with a query's diagonal.

    Args:
        dealing: the positions of all ranks.
        rank: the context-parallel rank.
        window: the number of positions that a query sees, its own included; None for all before it.
    """
    stops = list(accumulate(dealing.documents))
    found: list[AttentionTile] = []
    offset = 0  # of the run's first position, among the rank's own
    for run in dealing.runs[rank]:
        first = run.start
        while first < run.stop:
            document = bisect_right(stops, first)
            stop = min(run.stop, stops[document])
            start = stops[document] - dealing.documents[document]
            queries = range(offset + first - run.start, offset + stop - run.start)
            found += _of_run(first, queries, start, window)
            first = stop
        offset += len(run)
    return tuple(found)


def _of_run(first: int, queries: range, start: int, window: int | None) -> Iterator[AttentionTile]:
    """Yields the tiles of a run of queries, the first of them at position `first`, in the document from `start` on."""
    shift = first - queries.start
    whole = len(queries) if window is None else min(len(queries), max(0, start + window - first))
    if whole:  # these see their document from its start on
        yield AttentionTile(queries[:whole], range(first, first + whole), "diagonal")
        if start < first:
            yield AttentionTile(queries[:whole], range(start, first), "rectangle")
    for begin in range(queries.start + whole, queries.stop, window or 1):
        part = range(begin, min(queries.stop, begin + (window or 1)))
        yield from _in_window(part, shift, window or 1)


def _in_window(queries: range, shift: int, window: int) -> Iterator[AttentionTile]:
    """Yields the tiles of at most `window` queries at positions `shift` higher, which see `window` keys each."""
    first, stop = queries.start + shift, queries.stop + shift
    yield AttentionTile(queries, range(first, stop), "diagonal")
    if stop - window < first:
        yield AttentionTile(queries, range(stop - window, first), "rectangle")
    if len(queries) > 1:
        yield AttentionTile(queries[:-1], range(first - window + 1, stop - window), "edge")
