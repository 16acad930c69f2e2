"""Tiles of attention against the mask of whole rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tk.tests.example_counts import examples
from tk.tests.train.context.rows import any_rows
from tk.train.context.dealing import Dealing, deal
from tk.train.context.tiles import AttentionTile, tiles

windows = st.none() | st.integers(1, 40)


def counts(dealing: Dealing, rank: int, window: int | None) -> NDArray[np.int64]:
    """Returns how many tiles have each pair of a query of the rank and a position."""
    found = np.zeros((dealing.positions(rank).size, dealing.num_positions), np.int64)
    for tile in tiles(dealing, rank, window):
        size = len(tile.queries), len(tile.keys)
        seen = np.ones(size, np.int64)
        if tile.shape != "rectangle":
            assert size[0] == size[1]
            seen = np.tril(seen) if tile.shape == "diagonal" else np.triu(seen)
        assert seen.sum() == tile.num_pairs
        found[tile.queries.start : tile.queries.stop, tile.keys.start : tile.keys.stop] += seen
    return found


def mask(dealing: Dealing, rank: int, window: int | None) -> NDArray[np.int64]:
    """Returns whether each query of the rank sees each position, of all rows."""
    document = np.repeat(np.arange(len(dealing.documents)), dealing.documents)
    mine, place = dealing.positions(rank).reshape(-1, 1), np.arange(dealing.num_positions)
    seen = (document[mine] == document) & (place <= mine) & (mine - place < (window or dealing.num_positions))
    whole: NDArray[np.int64] = seen.astype(np.int64)
    return whole


@given(any_rows(), windows)
@examples(300)
def test_every_pair_is_in_one_tile_and_no_other_pair_in_any(dealing: Dealing, window: int | None) -> None:
    for rank in range(len(dealing.runs)):
        assert np.array_equal(counts(dealing, rank, window), mask(dealing, rank, window))


@given(any_rows(), windows)
@examples(150)
def test_a_query_is_on_one_diagonal_before_its_other_tiles(dealing: Dealing, window: int | None) -> None:
    for rank in range(len(dealing.runs)):
        begun: set[int] = set()
        for tile in tiles(dealing, rank, window):
            assert (tile.shape == "diagonal") != begun.issuperset(tile.queries)
            begun.update(tile.queries)
        assert len(begun) == dealing.positions(rank).size


def test_a_long_document_has_few_large_pieces() -> None:
    dealing = deal(1, 2**20, (), [None], 8)
    assert len(tiles(dealing, 3, None)) == 4, "a diagonal and a rectangle for the head, and for the tail"
    assert tiles(dealing, 0, None)[0] == AttentionTile(range(2**16), range(2**16), "diagonal")


def test_a_window_is_a_band_of_triangles_as_large_as_it_is() -> None:
    dealing = deal(1, 4096, (), [512], 1)
    found = tiles(dealing, 0, 512)
    assert [tile.shape for tile in found] == ["diagonal"] + ["diagonal", "edge"] * 7
    assert {len(tile.queries) for tile in found} == {512, 511}
