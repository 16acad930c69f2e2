"""Global batches: any dp and micro-batch size see the same rows, and rows that fill up a batch do not count."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tk.core.labels import IGNORED
from tk.data.batches import global_batch
from tk.data.row import Row


class CountedRows:
    """A source of rows: row i is i * 1000, i * 1000 + 1, ..."""

    seq_len = 3

    def __init__(self, apart: bool = False) -> None:
        self.apart = apart

    def row(self, index: int) -> Row:
        tokens = index * 1000 + np.arange(self.seq_len + 1, dtype=np.int64)
        return Row(tokens[:-1], tokens[1:], (1 + index % 2, 2 - index % 2) if self.apart else ())


@given(first=st.integers(0, 500), batch=st.integers(1, 20), dp=st.integers(1, 6), micro_batch_size=st.integers(1, 5))
def test_ranks_together_have_the_batch(first: int, batch: int, dp: int, micro_batch_size: int) -> None:
    ranks = [global_batch(CountedRows(), first, batch, rank, dp, micro_batch_size) for rank in range(dp)]
    assert len({len(micro_batches) for micro_batches in ranks}) == 1, "ranks meet in collectives"
    assert (len(ranks[0]) - 1) * dp * micro_batch_size < batch <= len(ranks[0]) * dp * micro_batch_size
    seen = []
    for micro in (micro for micro_batches in ranks for micro in micro_batches):
        assert micro.inputs.shape == micro.targets.shape == (micro_batch_size, 3)
        assert micro.inputs.dtype == micro.targets.dtype == np.int64
        real = micro.targets[:, 0] != IGNORED
        assert np.all(micro.targets[~real] == IGNORED)
        assert np.all(micro.inputs[~real] == 0)
        assert np.array_equal(micro.targets[real], micro.inputs[real] + 1)
        assert micro.num_valid == 3 * real.sum()
        rows = micro.inputs[real, 0] // 1000
        assert rows.tolist() == (micro.first_row + np.flatnonzero(real)).tolist()
        seen += rows.tolist()
    assert sorted(seen) == list(range(first, first + batch))


def test_one_rank_has_the_rows_in_order() -> None:
    micro_batches = global_batch(CountedRows(), 10, 5, dp_rank=0, dp=1, micro_batch_size=2)
    assert [micro.inputs[:, 0].tolist() for micro in micro_batches] == [[10000, 11000], [12000, 13000], [14000, 0]]
    assert micro_batches[-1].targets.tolist() == [[14001, 14002, 14003], [IGNORED] * 3]


def test_positions_begin_anew_with_each_document() -> None:
    (apart,) = global_batch(CountedRows(apart=True), 0, 3, dp_rank=0, dp=1, micro_batch_size=4)
    assert apart.documents == (1, 2, 2, 1, 1, 2, 3), "a row that fills up is one document"
    assert apart.positions.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 1], [0, 1, 2]]
    (whole,) = global_batch(CountedRows(), 0, 2, dp_rank=0, dp=1, micro_batch_size=2)
    assert whole.documents == ()
    assert whole.positions.tolist() == [[0, 1, 2]] * 2
