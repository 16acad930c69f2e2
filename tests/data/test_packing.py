"""Packing: each piece is in one row, no row is too full, and little room is left."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tk.data.packing import OPEN_ROWS, pack


@given(lengths=st.lists(st.integers(1, 20), max_size=60), room=st.integers(20, 40))
def test_every_piece_is_in_one_row_and_no_row_is_too_full(lengths: list[int], room: int) -> None:
    packing = pack(np.array(lengths, np.int64), room)
    rows = [packing.row(number).tolist() for number in range(len(packing.ends))]
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert all(row and row == sorted(row) for row in rows)
    filled = [sum(lengths[piece] for piece in row) for row in rows]
    assert all(size <= room for size in filled)
    # A piece opens a row only if no open row has room; no row was closed here, so no two rows would fit in one.
    assert all(a + b > room for i, a in enumerate(filled) for b in filled[i + 1 :])


def test_few_rows_stay_open() -> None:
    lengths = [19] * (3 * OPEN_ROWS) + [1] * (3 * OPEN_ROWS)
    packing = pack(np.array(lengths, np.int64), 20)
    whole = [row for row in range(len(packing.ends)) if len(packing.row(row)) == 2]
    assert len(whole) == OPEN_ROWS, "closed rows are not filled later"


def test_packing_leaves_little_room() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).clip(1, 2048).astype(np.int64)
    assert lengths.sum() / (len(pack(lengths, 2048).ends) * 2048) > 0.99
