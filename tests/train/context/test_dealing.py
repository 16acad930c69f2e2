"""Dealt positions: a partition into equal parts of a row, with equal numbers of query-key pairs."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tk.core.labels import IGNORED
from tk.tests.example_counts import examples
from tk.tests.train.context.rows import any_rows, documents_of
from tk.train.context.dealing import Dealing, deal


def brute_force_pairs(dealing: Dealing, windows: list[int | None]) -> list[int]:
    """Counts the keys of each query one by one."""
    document = np.repeat(np.arange(len(dealing.documents)), dealing.documents)
    place = np.arange(dealing.num_positions)
    counts = []
    for rank in range(len(dealing.runs)):
        mine = dealing.positions(rank).reshape(-1, 1)
        seen = (document[mine] == document) & (place <= mine)
        counts.append(sum(int((seen & (mine - place < (window or len(place)))).sum()) for window in windows))
    return counts


@given(any_rows())
@examples(300)
def test_every_position_has_one_rank_and_every_rank_as_many_of_each_row(dealing: Dealing) -> None:
    cp, rows = len(dealing.runs), dealing.num_rows
    parts = np.stack([dealing.positions(rank) for rank in range(cp)])
    assert parts.shape == (cp, rows, dealing.local_length)
    assert np.array_equal(np.sort(parts, axis=None), np.arange(dealing.num_positions))
    assert np.array_equal(parts // (cp * dealing.local_length), np.broadcast_to(np.arange(rows)[:, None], parts.shape))
    assert all((np.diff(part.reshape(-1)) > 0).all() for part in parts)
    for runs in dealing.runs:
        assert all(left.stop < right.start for left, right in pairwise(runs)), "runs are merged"


@given(any_rows(), st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=3))
@examples(150)
def test_pairs_are_those_of_each_query(dealing: Dealing, windows: list[int | None]) -> None:
    assert dealing.pairs(windows) == brute_force_pairs(dealing, windows)


@given(st.data())
@examples(150)
def test_ranks_compute_as_many_pairs(data: st.DataObject) -> None:
    """At most 1.02 of the mean, if a rank has 16 blocks of 128 positions or more."""
    cp = data.draw(st.sampled_from((2, 3, 4, 8)))
    length = data.draw(st.integers(cp * 16 * 128, cp * 16 * 160))
    windows = data.draw(st.lists(st.none() | st.integers(1, length), min_size=1, max_size=3))
    dealing = deal(1, length, data.draw(documents_of(length)), windows, cp)
    pairs = dealing.pairs(windows)
    assert max(pairs) * cp <= 1.02 * sum(pairs)
    assert dealing.local_length * cp < length + cp, "only the end of a row is padded"


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_one_document_is_dealt_by_head_and_tail(cp: int) -> None:
    dealing = deal(1, 64 * cp, (), [None], cp)
    for rank in range(cp):
        tail = 2 * cp - 1 - rank
        assert np.array_equal(dealing.positions(rank)[0] // 32, np.repeat((rank, tail), 32))
    pairs = dealing.pairs([None])
    assert min(pairs) == max(pairs)


def test_head_and_tail_alone_are_far_from_even_in_packed_rows() -> None:
    """A quarter of the row is one document. Its chunks are at the head, so the last ranks get none of it."""
    documents, cp = (2048, *(64,) * 96), 4
    chunks = np.arange(8192).reshape(2 * cp, -1)
    alone = Dealing(1, 8192, documents, tuple((_whole(chunks[r]), _whole(chunks[-1 - r])) for r in range(cp)))
    uneven, even = alone.pairs([None]), deal(1, 8192, documents, [None], cp).pairs([None])
    assert max(uneven) * cp > 2 * sum(uneven)
    assert max(even) * cp < 1.02 * sum(even)


def _whole(chunk: NDArray[np.int64]) -> range:
    return range(int(chunk[0]), int(chunk[-1]) + 1)


def test_short_documents_of_one_size_stay_where_they_lie() -> None:
    dealing = deal(1, 8192, (64,) * 128, [None], 4)
    assert dealing.runs == tuple((range(start, start + 2048),) for start in range(0, 8192, 2048))


def test_a_document_as_short_as_a_block_is_cut_finer() -> None:
    dealing = deal(1, 8192, (*(1,) * 77, 512, *(1,) * 7603), [None], 4)
    pairs = dealing.pairs([None])
    assert max(pairs) * 4 <= 1.02 * sum(pairs)


def test_tokens_targets_and_positions_travel_along() -> None:
    dealing = deal(2, 5, (2, 3, 5), [None], 2, multiple=2)
    assert dealing.documents == (2, 3, 3, 5, 3), "the three positions after a row's end are a document"
    values = np.arange(10).reshape(2, 5)
    parts = np.stack([dealing.take(rank, values, IGNORED) for rank in range(2)])
    assert parts.shape == (2, 2, 4)
    assert sorted(parts.reshape(-1)) == [IGNORED] * 6 + list(range(10))
    for rank in range(2):
        where = dealing.positions(rank)
        assert np.array_equal(parts[rank], np.where(where % 8 < 5, where // 8 * 5 + where % 8, IGNORED))


def test_one_rank_has_all_positions() -> None:
    dealing = deal(2, 7, (), [None], 1)
    assert dealing.runs == ((range(14),),)
    assert dealing.documents == (7, 7)
