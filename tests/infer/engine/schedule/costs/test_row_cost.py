"""The curve of the duration of steps by their rows."""

import pytest

from tk.infer.engine.schedule.costs.row_cost import RowCost


def test_it_is_straight_between_measured_steps_and_behind_them() -> None:
    cost = RowCost({2: 1.0, 4: 2.0, 8: 6.0})
    assert [cost.seconds(rows) for rows in range(10)] == [1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert cost.horizon == 8


def test_a_step_that_took_longer_than_one_of_more_rows_was_disturbed() -> None:
    cost = RowCost({1: 3.0, 2: 9.0, 4: 2.0, 8: 4.0})
    assert [cost.seconds(rows) for rows in (1, 2, 3, 4, 8)] == [2.0, 2.0, 2.0, 2.0, 4.0]


def test_one_measured_step_makes_all_alike() -> None:
    assert {RowCost({1: 2.5}).seconds(rows) for rows in (0, 1, 2, 100)} == {2.5}


@pytest.mark.parametrize(("rows", "more"), [(1, 8), (16, 32)])
def test_the_guess_is_flat_and_then_straight(rows: int, more: int) -> None:
    guess = RowCost()
    assert guess.seconds(more) / guess.seconds(rows) == (1 if more <= 8 else more / rows)
