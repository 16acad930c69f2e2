"""The share of keys that is fetched: as ranks fetch them, and for windows and rows of known sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.tests.example_counts import examples
from tk.train.context.dealing import deal
from tk.train.context.fetched_keys import fetched_shares
from tk.train.context.fetching import fetching


@given(
    st.integers(1, 150),
    st.lists(st.none() | st.integers(1, 80), min_size=1, max_size=3),
    st.integers(2, 5),
    st.integers(1, 3),
)
@examples(100)
def test_it_is_that_of_the_rank_that_fetches_most(
    row_length: int, windows: list[int | None], cp: int, multiple: int
) -> None:
    dealing = deal(1, row_length, (), windows, cp, multiple)
    others = dealing.num_positions - dealing.local_length
    for window, share in fetched_shares(row_length, tuple(windows), cp, multiple).items():
        plans = [fetching(dealing, rank, window) for rank in range(cp)]
        from_others = [sum(plan.received) - plan.received[rank] for rank, plan in enumerate(plans)]
        assert share == max(from_others) / others


def test_windows_need_few_keys_and_whole_rows_all() -> None:
    assert fetched_shares(8192, (None,), 4) == {None: 1.0}
    assert fetched_shares(8192, (128,), 4) == {128: pytest.approx(127 / 6144)}, "ranks have a quarter of the row each"
    assert fetched_shares(8192, (8192, None), 4) == {8192: 1.0, None: 1.0}
