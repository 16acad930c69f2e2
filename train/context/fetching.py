"""Which keys a context-parallel rank fetches from which rank for its attention, from plain numbers (no torch)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .dealing import Dealing, Integers
from .tiles import AttentionTile, tiles


@dataclass(frozen=True)
class Fetching:
    """The keys that a rank fetches for the layers of one window, and those that it sends.

    Attributes:
        tiles: the rank's tiles, whose `keys` are indexes among the fetched keys.
        sent: for each rank, the keys that it fetches from this one, as indexes among this rank's positions.
        received: for each rank, the number of keys that this one fetches from it.
        order: the place of each fetched key among those that arrive, rank after rank: in order of their positions.
        most: the largest number of keys that a rank fetches, its own included.
    """

    tiles: tuple[AttentionTile, ...]
    sent: tuple[Integers, ...]
    received: tuple[int, ...]
    order: Integers
    most: int


def fetching(dealing: Dealing, rank: int, window: int | None) -> Fetching:
    """Returns what a rank fetches and sends in layers with a window; None for all keys before a query."""
    cp = len(dealing.runs)
    of_ranks = [tiles(dealing, other, window) for other in range(cp)]
    needed = [_needed(dealing.num_positions, each) for each in of_ranks]
    held = [dealing.positions(other).reshape(-1) for other in range(cp)]
    arriving = [each[needed[rank][each]] for each in held]
    before: Integers = np.cumsum(needed[rank]) - needed[rank]
    return Fetching(
        tuple(_among(before, tile) for tile in of_ranks[rank]),
        tuple(np.flatnonzero(each[held[rank]]) for each in needed),
        tuple(len(each) for each in arriving),
        np.concatenate(arriving).argsort(),
        max(int(each.sum()) for each in needed),
    )


def _needed(num_positions: int, of_rank: Sequence[AttentionTile]) -> NDArray[np.bool_]:
    """Returns whether a rank's tiles have each position as a key, bool [positions]."""
    needed = np.zeros(num_positions, np.bool_)
    for tile in of_rank:
        needed[tile.keys.start : tile.keys.stop] = True
    return needed


def _among(before: Integers, tile: AttentionTile) -> AttentionTile:
    """Returns a tile with its keys as indexes among the fetched ones, of which `before` each position are some."""
    start = int(before[tile.keys.start])
    return replace(tile, keys=range(start, start + len(tile.keys)))
