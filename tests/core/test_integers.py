"""Division that rounds up."""

import pytest

from tk.core.integers import ceil_div, round_up


@pytest.mark.parametrize(("number", "divisor"), [(0, 4), (1, 4), (3, 4), (4, 4), (5, 4), (2**60 + 1, 3)])
def test_division_rounds_up(number: int, divisor: int) -> None:
    parts = ceil_div(number, divisor)
    assert (parts - 1) * divisor < number <= parts * divisor
    assert round_up(number, divisor) == parts * divisor
