"""Division that rounds up."""

import numpy as np
import pytest

from tk.core.integers import ceil_div, round_up


@pytest.mark.parametrize(("number", "divisor"), [(0, 4), (1, 4), (3, 4), (4, 4), (5, 4), (2**60 + 1, 3)])
def test_division_rounds_up(number: int, divisor: int) -> None:
    parts = ceil_div(number, divisor)
    assert (parts - 1) * divisor < number <= parts * divisor
    assert round_up(number, divisor) == parts * divisor


def test_each_number_of_an_array_is_divided() -> None:
    assert ceil_div(np.array([0, 1, 4, 5], np.int64), 4).tolist() == [0, 1, 1, 2]
