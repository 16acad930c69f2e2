"""The duration of steps of few tokens each of which has a row of logits, by their number.

`StepCost` is a straight line, right for prompts. Decoding is not one: the first rows come with the weights that one row
reads too, and kernels compute rows in groups. So this is a curve through steps that the engine measures at its start.
Only ratios of its values count, which other work on the machine and the length of the context change little.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final

# Without a measurement: a step of up to 8 rows takes as long as one of 1.
_GUESS: Final[Mapping[int, float]] = MappingProxyType({1: 1.0, 8: 1.0, 16: 2.0})


class RowCost:
    """A curve through measured steps, straight between them and behind them.

    A step of few rows that took longer than one of more was disturbed, and counts as long as that.

    Args:
        measured: seconds, above 0, by the number of rows, at least 1.

    Attributes:
        horizon: the largest measured number of rows.
    """

    def __init__(self, measured: Mapping[int, float] = _GUESS) -> None:
        falling = sorted(measured, reverse=True)
        knots = list(zip(falling, accumulate((measured[rows] for rows in falling), min), strict=True))[::-1]
        (least, seconds), self.horizon = knots[0], falling[0]
        self._seconds = [seconds] * (least + 1)
        for (rows, seconds), (more, longer) in pairwise(knots):
            self._seconds += [seconds + (longer - seconds) * i / (more - rows) for i in range(1, more - rows + 1)]
        half = self.horizon // 2
        self._slope = (self._seconds[-1] - self._seconds[half]) / (self.horizon - half)

    def seconds(self, num_rows: int) -> float:
        """Returns the duration of a step of so many rows."""
        if num_rows <= self.horizon:
            return self._seconds[num_rows]
        return self._seconds[-1] + self._slope * (num_rows - self.horizon)
