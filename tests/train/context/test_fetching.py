"""Fetched keys: those of the tiles and no others, from the ranks that have them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tk.tests.example_counts import examples
from tk.tests.train.context.rows import any_rows
from tk.train.context.dealing import Dealing, deal
from tk.train.context.fetching import fetching
from tk.train.context.tiles import tiles


@given(any_rows(), st.none() | st.integers(1, 40))
@examples(200)
def test_ranks_send_the_keys_that_others_fetch(dealing: Dealing, window: int | None) -> None:
    cp = len(dealing.runs)
    plans = [fetching(dealing, rank, window) for rank in range(cp)]
    held = [dealing.positions(rank).reshape(-1) for rank in range(cp)]
    for rank, plan in enumerate(plans):
        arriving = [held[other][plans[other].sent[rank]] for other in range(cp)]
        assert tuple(map(len, arriving)) == plan.received
        fetched = np.concatenate(arriving)[plan.order]
        assert (np.diff(fetched) > 0).all()
        for mine, whole in zip(plan.tiles, tiles(dealing, rank, window), strict=True):
            assert fetched[mine.keys.start : mine.keys.stop].tolist() == list(whole.keys)
        needed = {position for tile in tiles(dealing, rank, window) for position in tile.keys}
        assert set(fetched.tolist()) == needed
        assert len(fetched) <= plan.most
    assert plans[0].most in [len(plan.order) for plan in plans]


def test_documents_and_windows_leave_keys_where_they_are() -> None:
    short = deal(1, 8192, (64,) * 128, [None], 4)
    assert fetching(short, 1, None).received == (0, 2048, 0, 0)
    window = deal(1, 8192, (), [128], 4)
    assert fetching(window, 1, 128).received == (127, 2048, 0, 0)
