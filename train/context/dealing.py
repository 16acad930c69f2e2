"""Which positions of a micro-batch's rows each context-parallel rank computes: a pure function (no torch).

A rank computes the same number of positions of every row as each other rank, and almost the same number of query-key
pairs. So a row is cut into blocks, which are dealt. If it is one document, that ends with one block of its head and
one of its tail for each rank, as in zigzag ring attention; many short documents are dealt as they lie. Only a row's
end is padded: each rank gets ceil(row length / cp) positions, rounded up to a multiple if that is asked for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...core.integers import ceil_div, round_up

Integers = NDArray[np.int64]
Runs = tuple[range, ...]

_CLOSE_ENOUGH: Final = 1.01  # max / mean of the ranks' query-key pairs at which no finer blocks are tried
_BLOCKS_PER_RANK: Final = tuple(2**power for power in range(1, 9))
_SMALLEST_BLOCK: Final = 8
_SWAPS_PER_RANK: Final = 8


@dataclass(frozen=True)
class Dealing:
    """The positions of a micro-batch's rows, which are padded and laid end to end, with their ranks.

    Attributes:
        num_rows: the rows of the micro-batch.
        row_length: the number of positions of a row without its padding.
        documents: the lengths of the documents over all positions. A row's padding is a document of its own.
        runs: the positions of each rank, as ranges in ascending order.
    """

    num_rows: int
    row_length: int
    documents: tuple[int, ...]
    runs: tuple[Runs, ...]

    @property
    def num_positions(self) -> int:
        """The number of positions of all rows, with their padding."""
        return sum(self.documents)

    @property
    def local_length(self) -> int:
        """The number of positions of a row that each rank computes."""
        return self.num_positions // self.num_rows // len(self.runs)

    def positions(self, rank: int) -> Integers:
        """Returns a rank's positions, int64 [num_rows, local_length], among those of all rows."""
        runs = [np.arange(run.start, run.stop) for run in self.runs[rank]]
        return np.concatenate(runs).reshape(self.num_rows, -1)

    def take(self, rank: int, values: Integers, padding: int) -> Integers:
        """Returns a rank's part of int64 [num_rows, row_length], as [num_rows, local_length].

        Args:
            rank: the context-parallel rank.
            values: a value for each position, such as its token, its target or its place in its document.
            padding: the value for the positions beyond a row's end.
        """
        more = self.num_positions // self.num_rows - self.row_length
        return np.pad(values, ((0, 0), (0, more)), constant_values=padding).reshape(-1)[self.positions(rank)]

    def pairs(self, windows: Sequence[int | None]) -> list[int]:
        """Returns the number of query-key pairs that each rank computes in layers with these windows."""
        before = pairs_before(self.documents, windows)
        return [int(sum(before[run.stop] - before[run.start] for run in runs)) for runs in self.runs]


def deal(
    num_rows: int,
    row_length: int,
    documents: Sequence[int],
    windows: Sequence[int | None],
    cp: int,
    multiple: int = 1,
) -> Dealing:
    """Deals the positions of a micro-batch to context-parallel ranks.

    Args:
        num_rows: the number of rows, each dealt by itself.
        row_length: the number of positions of each row.
        documents: the lengths of the documents, row after row; () for rows that are one document each.
        windows: the attention window of each layer, the query's own position included; None for no window.
        cp: the number of ranks.
        multiple: the number that must divide each rank's number of positions of a row, as tp does under sequence
            parallelism.
    """
    local = local_length(row_length, cp, multiple)
    padding = (cp * local - row_length,) if cp * local > row_length else ()
    rows = [(*row, *padding) for row in _rows(documents, row_length)] or [(row_length, *padding)] * num_rows
    dealt: dict[tuple[int, ...], tuple[Runs, ...]] = {}
    runs: list[list[range]] = [[] for _ in range(cp)]
    for number, row in enumerate(rows):
        if row not in dealt:
            dealt[row] = _deal_row(pairs_before(row, windows), local, cp)
        for mine, of_row in zip(runs, dealt[row], strict=True):
            mine += [range(number * cp * local + run.start, number * cp * local + run.stop) for run in of_row]
    flat = tuple(length for row in rows for length in row)
    return Dealing(num_rows, row_length, flat, tuple(_merged(mine) for mine in runs))


def local_length(row_length: int, cp: int, multiple: int = 1) -> int:
    """Returns the number of positions of a row that each rank computes; for arguments see `deal`."""
    return round_up(ceil_div(row_length, cp), multiple)


def pairs_before(documents: Sequence[int], windows: Sequence[int | None]) -> Integers:
    """Returns the query-key pairs of all queries before each position, int64 [positions + 1], summed over layers."""
    lengths = np.array(documents, np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    seen = np.arange(1, len(starts) + 1) - starts
    pairs = np.zeros(len(starts) + 1, np.int64)
    for window, layers in Counter(windows).items():
        pairs[1:] += layers * (seen if window is None else np.minimum(seen, window))
    return np.cumsum(pairs)


def _rows(documents: Sequence[int], row_length: int) -> Iterator[tuple[int, ...]]:
    """Yields the documents of each row."""
    ends = np.cumsum(np.array(documents, np.int64))
    last = np.flatnonzero(ends % row_length == 0) + 1
    for first, stop in zip([0, *last.tolist()], last.tolist(), strict=False):
        yield tuple(documents[first:stop])


def _merged(runs: Sequence[range]) -> Runs:
    """Returns ascending ranges in which ranges that touch each other are one."""
    merged: list[range] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return tuple(merged)


def _deal_row(before: Integers, local: int, cp: int) -> tuple[Runs, ...]:
    """Returns each rank's runs of a row: the fewest of the largest blocks that give all ranks about as many pairs."""
    if cp == 1:
        return ((range(local),),)
    deals: list[tuple[Runs, ...]] = []
    imbalances: list[float] = []
    for size in sorted({ceil_div(local, number) for number in _BLOCKS_PER_RANK}, reverse=True):
        blocks = _Blocks(before, local, cp, size)
        found = list(blocks.deals())
        even = [blocks.runs(owners) for owners in found if blocks.imbalance(owners) <= _CLOSE_ENOUGH]
        if even:
            return min(even, key=lambda runs: sum(map(len, runs)))
        deals += [blocks.runs(owners) for owners in found]
        imbalances += [blocks.imbalance(owners) for owners in found]
        if size <= _SMALLEST_BLOCK:
            break
    return deals[imbalances.index(min(imbalances))]


class _Blocks:
    """The blocks of a row. All but the last of each of the row's cp equal parts have the same size.

    Each rank gets as many blocks of the same size, and one last one of a part.

    Args:
        before: see `pairs_before`.
        local: the number of positions of a rank.
        cp: the number of ranks.
        size: the positions of a block.
    """

    def __init__(self, before: Integers, local: int, cp: int, size: int) -> None:
        self.cp, self.num_whole = cp, local // size
        whole = [(part, part * local + place * size) for part in range(cp) for place in range(self.num_whole)]
        last = [(part, part * local + self.num_whole * size) for part in range(cp)] if local % size else []
        self.parts, self.starts = np.array(whole + last).T
        self.stops = self.starts + np.repeat((size, local % size), (len(whole), len(last)))
        self.pairs = before[self.stops] - before[self.starts]

    @cached_property
    def mean(self) -> float:
        """The mean of the ranks' pairs."""
        return float(self.pairs.sum() / self.cp)

    def loads(self, owners: Integers) -> NDArray[np.float64]:
        """Returns the pairs of each rank."""
        return np.bincount(owners, self.pairs, self.cp).astype(np.float64)

    def imbalance(self, owners: Integers) -> float:
        """Returns the largest of the ranks' pairs, divided by their mean."""
        return float(self.loads(owners).max() / self.mean)

    def deals(self) -> Iterator[Integers]:
        """Yields the ranks of all blocks, in some deals: parts as they lie, there and back, and both after swaps."""
        turn, place = np.divmod(np.arange(len(self.parts)), self.cp)
        plain = (self.parts, np.where(turn % 2, self.cp - 1 - place, place))
        yield from plain
        yield from (self._balanced(owners) for owners in plain)

    def _balanced(self, owners: Integers) -> Integers:
        """Returns owners after swaps of a block of the rank with the most pairs for one with fewer pairs."""
        owners, loads = owners.copy(), self.loads(owners)
        for _ in range(_SWAPS_PER_RANK * self.cp):
            most = int(loads.argmax())
            swaps = (self._swap(owners, most, int(other), loads) for other in loads.argsort())
            swap = next((swap for swap in swaps if swap), None)
            if swap is None or loads[most] <= _CLOSE_ENOUGH * self.mean:
                break
            owners[[*swap]] = owners[[*swap[::-1]]]
            loads = self.loads(owners)
        return owners

    def _swap(self, owners: Integers, most: int, other: int, loads: NDArray[np.float64]) -> tuple[int, int] | None:
        """Returns the two blocks whose swap brings two ranks closest to each other; None if it would not."""
        whole = owners[: self.num_whole * self.cp]
        mine, theirs = np.flatnonzero(whole == most), np.flatnonzero(whole == other)
        gap = loads[most] - loads[other]
        moved = self.pairs[mine][:, None] - self.pairs[theirs]
        best = int(np.abs(moved - gap / 2).argmin())
        row, column = divmod(best, len(theirs))
        return (int(mine[row]), int(theirs[column])) if 0 < moved[row, column] < gap else None

    def runs(self, owners: Integers) -> tuple[Runs, ...]:
        """Returns each rank's positions in ascending order."""
        return tuple(
            _merged([range(self.starts[i], self.stops[i]) for i in mine[self.starts[mine].argsort()].tolist()])
            for mine in (np.flatnonzero(owners == rank) for rank in range(self.cp))
        )
