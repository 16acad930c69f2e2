"""The rows that sample, and those among them whose proposals came true."""

import numpy as np

from tk.core.casts import Array
from tk.infer.engine.step.sampled_rows import SampledRows


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def test_a_span_has_a_row_for_its_last_token_and_each_proposal() -> None:
    rows = SampledRows.of(
        np.stack([ints(4, 7, 2, 3), ints(0, 5, 6, 11), ints(8, 9, 0, 1), ints(0, -1, -1, 1)]), ints(1, 0, 3, 2)
    )
    assert rows.mask.tolist() == [0, -1, -1, -1, 1, 1]
    assert rows.slot.tolist() == [4, 2, 2, 2, 3, 3]
    assert rows.token.tolist() == [0, 6, 7, 8, 11, 12]
    assert rows.number.tolist() == [8, 0, 1, 2, 1, 2]
    assert rows.num_proposals.tolist() == [0, 0, 1, 2, 0, 1]
    plain = SampledRows.of(np.stack([ints(4, 7), ints(0, 5), ints(8, 9), ints(-1, -1)]), ints(1, 0))
    assert (plain.slot.tolist(), plain.token.tolist(), plain.num_proposals.tolist()) == ([4], [0], [0])
    assert {each.dtype for each in (rows.slot, rows.token, rows.number, plain.token)} == {np.dtype(np.int32)}


def test_rows_count_up_to_the_first_wrong_proposal() -> None:
    rows = SampledRows.of(np.stack([ints(0, 1, 2), ints(0, 4, 5), ints(0, 0, 0), ints(-1, -1, -1)]), ints(4, 1, 3))
    given = ints(9, 5, 6, 7, 9, 9, 5, 6)
    for sampled, expected in (
        ([5, 6, 7, 8, 1, 5, 6, 7], [1, 1, 1, 1, 1, 1, 1, 1]),
        ([5, 0, 7, 8, 1, 0, 6, 7], [1, 1, 0, 0, 1, 1, 0, 0]),
        ([0, 6, 7, 8, 9, 5, 0, 7], [1, 0, 0, 0, 1, 1, 1, 0]),
    ):
        assert rows.come_true(ints(*sampled), given).tolist() == [bool(each) for each in expected]
