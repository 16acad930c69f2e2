"""The share of keys that context-parallel ranks fetch from each other, as windows and the dealing decide (no torch)."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from .dealing import Dealing, deal
from .tiles import tiles


@lru_cache(maxsize=64)  # a plan asks many times
def fetched_shares(
    row_length: int, windows: tuple[int | None, ...], cp: int, multiple: int = 1
) -> Mapping[int | None, float]:
    """Returns by window the share of all other ranks' keys that a rank fetches: the rank that fetches most.

    It is that of rows that are one document; packed documents need fewer keys.

    Args:
        row_length, windows, cp, multiple: see `deal`; cp is 2 or more.
    """
    dealing = deal(1, row_length, (), windows, cp, multiple)
    local, others = dealing.local_length, dealing.num_positions - dealing.local_length
    most = {window: max(_num_keys(dealing, rank, window) for rank in range(cp)) for window in dict.fromkeys(windows)}
    return MappingProxyType({window: (count - local) / others for window, count in most.items()})


def _num_keys(dealing: Dealing, rank: int, window: int | None) -> int:
    """Returns the number of different keys that a rank's queries see, its own included."""
    count, stop = 0, 0
    for keys in sorted((tile.keys for tile in tiles(dealing, rank, window)), key=lambda keys: keys.start):
        count += max(0, keys.stop - max(keys.start, stop))
        stop = max(stop, keys.stop)
    return count
